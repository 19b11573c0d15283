"""What training repositories copy from each other, once, on every model."""
