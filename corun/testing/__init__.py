"""A cluster in one process, for tests of programs that call CoRun: real services around engines that only hash.

It needs the extra `router`, and neither an engine nor a GPU. Like nothing else in `corun`, it knows the router and the
nodes. See docs/testing.md.
"""

from corun.config.extras import needs_extra

with needs_extra("corun.testing", "router"):
    from corun.testing.cluster import LocalCluster, local_cluster
    from corun.testing.engines import FakeDecodeEngine, FakeKv, FakePrefillEngine, expected, expected_scores
    from corun.testing.nodes import LocalNode

__all__ = [
    "FakeDecodeEngine",
    "FakeKv",
    "FakePrefillEngine",
    "LocalCluster",
    "LocalNode",
    "expected",
    "expected_scores",
    "local_cluster",
]
