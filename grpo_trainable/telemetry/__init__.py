"""What a trial measures of itself: stages, clocks, the load of its machine."""
