"""From a config to objects: what may be written, what it means, and one line where it is wrong."""
