"""The formats of checkpoints, one module each, and the registry that outside packages can join."""
