"""The cluster on Ray: nodes, workers, reserved devices."""
