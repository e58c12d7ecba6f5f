"""The command lines, one file each. No other package imports them."""
