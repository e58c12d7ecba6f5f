"""The pipeline in virtual time: schedules of any size without a machine of that size."""
