"""What the repository's pages are made with; no part of the package."""
