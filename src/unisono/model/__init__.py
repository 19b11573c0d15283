"""Contract of a computation model, and the types that it uses."""
