"""Detection of this process's rank and node from the variables of launchers and platforms."""
