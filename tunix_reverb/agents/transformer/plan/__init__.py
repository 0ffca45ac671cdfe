"""Says without hardware whether a learner's update fits, and how fast it is."""
