"""``horovodrun``."""
