"""WorkerPool: processes that run only user code."""
