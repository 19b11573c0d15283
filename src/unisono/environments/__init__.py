"""Who am I? What launchers' variables say."""
