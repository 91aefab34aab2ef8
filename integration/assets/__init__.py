"""Data shipped with the package: the demo's sentiment direction and its passport."""
