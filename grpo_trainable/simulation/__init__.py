"""Simulation of the pipeline in virtual time, for schedules of any size on a small machine."""
