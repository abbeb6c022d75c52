"""Measures a router's capacity and the delay it adds, with nodes that compute nothing. Must not know engines."""
