"""The pipeline: stages over channels, one inequality for admission, a ledger for what became of every group."""
