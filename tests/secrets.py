"""Certificates and tokens for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.cli import issue_certs
from corun.config.fields import TlsConfig
from corun.rpc.channel import Access


@dataclass(frozen=True)
class Secrets:
    """The certificates, keys and tokens that `corun certs` wrote."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Secrets:
        issue_certs.make(directory, ["127.0.0.1", "localhost"])
        return cls(directory)

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def token(self, name: str) -> str:
        return (self.directory / f"{name}.token").read_text().strip()

    @property
    def tls(self) -> TlsConfig:
        """The TLS settings of a client without a certificate."""
        return TlsConfig(ca=self.path("ca.pem"))

    def tls_of(self, name: str) -> TlsConfig:
        """Return the TLS settings of a member or a client with the certificate `name`."""
        return TlsConfig(ca=self.path("ca.pem"), cert=self.path(f"{name}.pem"), key=self.path(f"{name}.key"))

    @property
    def member(self) -> Access:
        return Access(tls=self.tls_of("member"), token=self.token("cluster"))

    @property
    def client(self) -> Access:
        return Access(tls=self.tls, token=self.token("client"))

    @property
    def settings(self) -> dict[str, Any]:
        """The security settings of a router."""
        return {
            "tls_ca": self.path("ca.pem"),
            "tls_cert": self.path("member.pem"),
            "tls_key": self.path("member.key"),
            "cluster_token_file": self.path("cluster.token"),
            "client_tokens_file": self.path("clients.tokens"),
        }

    @property
    def texts(self) -> list[str]:
        """The texts that must never appear anywhere: both tokens, and one line of each private key."""
        keys = [(self.directory / f"{name}.key").read_text().splitlines()[1] for name in ("ca", "member", "client")]
        return [self.token("cluster"), self.token("client"), *keys]
