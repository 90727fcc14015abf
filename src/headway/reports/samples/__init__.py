"""Samples: answers of sampled groups and held-out problems, and the colours of their tokens."""
