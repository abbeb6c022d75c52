"""The colocated node: a prefill node and a decode node with one engine, in one process."""
