"""Other libraries' names over unisono, so that a repository changes one import."""
