"""The commands, one file per command. No other package imports these files."""
