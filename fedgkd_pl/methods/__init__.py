"""One file per algorithm: its server half, then its client half."""
