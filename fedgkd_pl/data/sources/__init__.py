"""Data of the user's own: one class per kind of source, which Python and YAML can name."""
