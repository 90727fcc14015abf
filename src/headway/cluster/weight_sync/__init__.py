"""The driver's view of a weight update: connections of workers, and the version in each copy."""
