"""Every setting of every process: its field, its limits, its place in `cluster.toml` and in the docs."""
