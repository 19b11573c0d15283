"""``torch_xla``'s own launcher."""
