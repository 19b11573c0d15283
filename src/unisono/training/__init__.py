"""Training helpers for every model: data-parallel wrappers, loaders, checkpoints, metrics."""
