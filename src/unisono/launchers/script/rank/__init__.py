"""The wrapper between a launcher and one rank of a script, run by its folder's path."""
