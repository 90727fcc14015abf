"""WorkerPool: processes that hold user code, and nothing else."""
