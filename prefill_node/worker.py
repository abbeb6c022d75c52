"""The vLLM worker of a prefill node: the stock one, observed.

Prefill steps need no padding: an isolated prompt always has the shape that its own length gives.
"""

from corun.node.worker import NodeWorker


class PrefillWorker(NodeWorker):
    """Computes isolated prompts with the stock model runner."""
