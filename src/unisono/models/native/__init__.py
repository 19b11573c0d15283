"""``torch.distributed``, over any backend registered with torch."""
