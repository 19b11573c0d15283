"""The contract of a computation model, and what it is stated in."""
