"""The control plane: everything that is no accelerator tensor, exchanged on the host."""
