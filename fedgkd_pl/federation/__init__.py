"""What a round is made of: seeds, messages, the mean, the client's Trainer."""
