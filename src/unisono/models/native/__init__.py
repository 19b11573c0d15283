"""``torch.distributed``, over any backend that torch knows."""
