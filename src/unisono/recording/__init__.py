"""What a rank records of its calls: for its status page, for hooks, and for a trace."""
