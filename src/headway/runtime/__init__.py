"""What every part of Headway runs on: task groups, signals, frames, worker processes for user code, the sandbox."""
