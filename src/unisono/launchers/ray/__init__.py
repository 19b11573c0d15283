"""The launcher for Ray."""
