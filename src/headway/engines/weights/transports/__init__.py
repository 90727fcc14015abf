"""Transports: how buckets get from each sender to every receiver. One file each.

`headway.engines.weights.protocols` opens one by its name.

All promise the same: every receiver gets all buckets of the version that it asked for, or `UpdateFailed` within the
time-out, at both ends.
"""
