"""The implementation of the commands in `launch/` that need no experiment."""
