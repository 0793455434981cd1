"""What every rank did when: recorded, merged over processes, drawn."""
