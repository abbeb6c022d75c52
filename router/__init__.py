"""The router process. It validates, queues, places, streams and fails over requests. It computes nothing itself."""
