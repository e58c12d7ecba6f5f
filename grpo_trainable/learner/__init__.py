"""The learner, which turns scored groups into new weights."""
