"""Bytes on a disk: whole or not there, read as data, never run."""
