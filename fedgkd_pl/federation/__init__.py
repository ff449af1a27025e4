"""What a round is made of: messages, the mean, the server's half, the client's Trainer."""
