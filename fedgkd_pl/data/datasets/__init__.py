"""The datasets that come with the package, by their kind."""
