"""Every public collective, written once over the model of the active context."""
