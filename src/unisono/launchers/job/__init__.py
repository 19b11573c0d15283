"""One job of ranks: how it starts, what its ranks tell, and how it ends."""
