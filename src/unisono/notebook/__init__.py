"""Cells of a notebook that run in warm ranks: ``%load_ext unisono``, then ``%%ranks 4``."""
