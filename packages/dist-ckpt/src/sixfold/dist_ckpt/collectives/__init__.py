"""What ranks tell each other, each wait with a deadline."""
