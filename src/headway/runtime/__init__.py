"""Foundation of all packages: task groups, signals, frames, worker processes for user code, the sandbox."""
