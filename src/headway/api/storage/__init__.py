"""A run's storage, ``run.storage``: upload of finished files to a directory or an object store, and restoring.

run.dir ── uploader: pieces, then run.json; checkpoints, state.json last ──▶ run.storage ── brought_back ──▶ run.dir
"""
