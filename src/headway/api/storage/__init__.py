"""A run's storage, ``run.storage``: what a run has closed goes to a directory or an object store, and comes back.

run.dir ── uploader: pieces, then run.json; checkpoints, state.json last ──▶ run.storage ── brought_back ──▶ run.dir
"""
