"""Environments and agent loops in the forms of other projects."""
