"""Benchmarks: each measures ratios within one run, interleaved, and reports medians."""
