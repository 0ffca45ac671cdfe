"""The learner: batches in, variables out."""
