"""The gateway: a cluster over HTTP, in the shape of OpenAI's API as vLLM serves it.

A process of its own and a client of the cluster, so failover, resumption and receipts are those of the SDK. It keeps
nothing between requests, and computes nothing: no tokenizer, no queue, no seeds.
"""
