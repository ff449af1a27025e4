"""Processes of our own: how they start, print, stop and end."""
