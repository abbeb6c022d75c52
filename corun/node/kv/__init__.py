"""KV between nodes: who owns a block, how it is handed over, and what is checked after it was read."""
