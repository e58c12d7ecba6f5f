"""Environments of other packages as environments of episodes, as they are."""
