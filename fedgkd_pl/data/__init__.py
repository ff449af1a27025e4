"""Datasets, partitions and who owns what."""
