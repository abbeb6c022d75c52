"""The router process: validates, queues, places, streams and fails over. It computes nothing itself."""
