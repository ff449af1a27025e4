"""Where the clients of a round train."""
