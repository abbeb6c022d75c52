"""KV between nodes: which prompt owns a block, how a block is handed over, and what is checked after it was read."""
