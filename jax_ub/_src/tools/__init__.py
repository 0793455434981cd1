"""Commands and reports: they show, measure and start the library."""
