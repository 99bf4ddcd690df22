"""What is held and what was moved, as values and as pictures."""
