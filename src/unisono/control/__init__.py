"""The control plane: everything that isn't an accelerator tensor, exchanged on the host."""
