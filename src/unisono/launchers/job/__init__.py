"""One job of ranks: its processes, their channels, its failures and its end."""
