"""The learner: scored groups in, new weights out."""
