"""Who am I? What launchers' variables say, one file for one environment."""
