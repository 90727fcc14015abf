"""Transports: how buckets get from the one sender to every receiver.

`factory` picks one by its name; `local` hands buckets over inside one process, `broadcast` sends them through a process
group of its own. All promise the same: every receiver gets all buckets of the version that it asked for, or
`UpdateFailed` within the time-out, at both ends.
"""
