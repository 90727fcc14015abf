"""The live view of a run: on a terminal, as plain lines, in a notebook."""
