"""The control plane: how bytes that are no accelerator's travel between ranks."""
