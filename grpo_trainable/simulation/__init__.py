"""The pipeline in virtual time: it runs schedules of any size on a small machine."""
