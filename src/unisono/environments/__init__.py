"""Which rank is this, and which node? Read from the variables of launchers and platforms."""
