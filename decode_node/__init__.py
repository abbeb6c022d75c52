"""A decode node draws every output token in steps of one fixed shape."""
