"""What a router carries and adds, with nodes that compute nothing. Must not know engines."""
