"""Admission of prompts: staleness, the ledger, the queue and the state that stages share."""
