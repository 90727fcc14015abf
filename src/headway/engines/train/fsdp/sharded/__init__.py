"""Sharded tensors: placement on the mesh, gathering, export and checkpoints."""
