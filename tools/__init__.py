"""The programs that make the repository's pages; no part of the package."""

from pathlib import Path

REPO = Path(__file__).parents[1]
