"""Everything for Flower: the engine, both apps, the messages and the contract."""
