"""The datasets that come with the package, one file each."""
