"""What is too old to learn from, and how much of it there was."""
