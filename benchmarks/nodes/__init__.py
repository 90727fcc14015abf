"""Machines made of Linux namespaces, for tests and for faults."""
