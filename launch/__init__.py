"""The command lines: a file each, and what they share. No other package imports them."""
