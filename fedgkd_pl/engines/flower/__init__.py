"""Everything Flower: the engine, both halves of an app, what travels and what is agreed."""
