"""Measurements, each in one run and as ratios."""
