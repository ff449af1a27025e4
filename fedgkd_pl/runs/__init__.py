"""A run's folder: what is written there, when, and how a run goes on from it."""
