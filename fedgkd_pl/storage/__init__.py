"""Files that are complete or not there, and read as data, never run."""
