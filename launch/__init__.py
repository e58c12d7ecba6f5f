"""The command lines: each file is one command, and nothing imports them."""
