"""Named overlaps and tuned files: keys, defaults and parsing, without state."""
