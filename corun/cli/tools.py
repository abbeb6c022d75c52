"""`corun gateway` and `corun certs`: commands whose work stands elsewhere, in packages that may lack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from corun.config.extras import load
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
        load("corun.gateway.app", "corun gateway", "router").main(self)
        return 0


@dataclass(frozen=True, kw_only=True)
class Certs:
    """Make certificates and tokens for a cluster of your own.

    Writes ca.pem, member.pem, client.pem with their keys, cluster.token, clients.tokens, client.token, and seed.key for
    the routers. Existing files are never overwritten.

    examples:
      corun certs secrets --hosts 127.0.0.1 10.0.0.7 router.example.org
      corun up --host 10.0.0.7 --tls-ca secrets/ca.pem --tls-cert secrets/member.pem --tls-key secrets/member.key
          --cluster-token-file secrets/cluster.token --client-tokens-file secrets/clients.tokens
      corun status --router 10.0.0.7:50051 --tls-ca secrets/ca.pem --token-file secrets/client.token
    """

    directory: tyro.conf.Positional[Path]
    """Where to write the files."""
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost")
    """Names and addresses at which the cluster's processes are reached."""

    def run(self) -> int:
        certs = load("corun.cli.issue_certs", "corun certs", "router")
        for path in certs.make(self.directory, self.hosts):
            print(path)
        return 0
