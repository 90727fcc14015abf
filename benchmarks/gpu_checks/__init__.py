"""The checks of ``python -m benchmarks.gpu``: each a function of a `Setting`, run in a process of its own.

Every check has a CPU form, the same code with ``device="cpu"``: the tests run it, and plant defects for it to find.
"""
