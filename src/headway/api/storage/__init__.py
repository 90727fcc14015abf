"""A run's storage, ``run.storage``: finished files of a run go to a directory or an object store, and come back.

run.dir ── uploader: pieces, then run.json; checkpoints, state.json last ──▶ run.storage ── brought_back ──▶ run.dir
"""
