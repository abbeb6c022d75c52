"""The nodes of a cluster as a router sees them: which nodes there are, whether they can be used, and calls to them."""
