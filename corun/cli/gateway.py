"""`corun gateway`: the cluster over HTTP. The work is `corun.gateway`, which needs the serving packages."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from corun.config.extras import needs_extra
from corun.gateway.config import GatewayConfig


@dataclass(frozen=True, kw_only=True)
class Gateway(GatewayConfig):
    """Serve a running cluster over HTTP, as OpenAI's API.

    examples:
      corun gateway --router 127.0.0.1:50051 --port 8000
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon", "seed": 42}'
      corun bench serve --base-url http://localhost:8000 --dataset-name random

    The token of a request (Authorization: Bearer) is the token that the router sees. SIGTERM and Ctrl-C let running
    requests end. On another address than this machine's own loopback it starts with TLS only, or with --insecure.
    """

    def run(self) -> int:
        with needs_extra("corun gateway", "router"):
            app = importlib.import_module("corun.gateway.app")
        app.main(self)
        return 0
