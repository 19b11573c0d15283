"""Memory shared on one host."""
