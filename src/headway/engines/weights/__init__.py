"""The way of weights from the trainer to every copy of the policy: buckets, the back buffer and the transports."""
