"""`corun certs`: certificates and tokens for one cluster. The work is `corun.cli.issue_certs`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import tyro

from corun.config.extras import needs_extra


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
        with needs_extra("corun certs", "router"):
            certs = importlib.import_module("corun.cli.issue_certs")
        for path in certs.make(self.directory, self.hosts):
            print(path)
        return 0
