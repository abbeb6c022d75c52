"""The nodes of a cluster as a router sees them: who they are, whether they can be used, how they are called."""
