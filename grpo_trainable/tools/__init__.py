"""What the other commands do."""
