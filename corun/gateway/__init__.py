"""The gateway: a cluster over HTTP, in the shape of OpenAI's API as vLLM serves it.

The gateway is a process of its own and a client of the cluster, so failover, resumption and receipts are those of the
SDK. It keeps nothing between requests: it has no tokenizer, no queue and no seeds. It computes nothing but the text
that the model's template makes of a chat.
"""
