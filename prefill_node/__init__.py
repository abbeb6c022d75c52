"""A prefill node computes each prompt's KV alone and keeps it until a decode node has read it."""
