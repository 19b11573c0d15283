"""The folder that makes an interpreter the server of a script's ranks."""
