"""Configuration of the processes: frozen, complete and checked when made. Nothing changes it afterwards.

Secrets are in files. A config holds their paths and checks at once that the files can be used. `corun.config.flags`
turns a command line into a config. This module must not know the environment, the engines or the services.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from corun.errors import InvalidArgumentError, Shown
from corun.rpc.auth import ClientToken, read_client_tokens, read_token

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The most bytes of a message that a process accepts, by default."""
CLIENT_TIMEOUT_S = 30.0
"""The number of seconds that a server waits for a client to send or to take a message, by default."""
MAX_UNSENT_TOKENS = 65_536
"""The most tokens of one request that a router keeps for a slow reader, by default."""
SEED_KEY_VARIABLE = "CORUN_SEED_KEY"
"""The environment variable with a router's seed key. It is no flag, since everyone on a machine sees command lines."""

SECRET = {"secret": True}
"""The metadata of a field that a command line must not set, since everyone on the machine can read command lines."""
CONTRACT = {"contract": True}
"""The metadata of a field that enters the contract: nodes that differ in it do not serve together."""
# "unit" in a field's metadata is the unit for tables of settings, if the field's name does not end with the unit.

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """The paths of the PEM files of one end of TLS links, and which authorities it trusts.

    Raises InvalidArgumentError if a file cannot be used, or if only one of `cert` and `key` is given.
    """

    cert: str = ""
    """The file of this end's certificate, with the certificates between it and its authority."""
    key: str = ""
    """The file of the certificate's private key."""
    ca: str = ""
    """The file of the authorities that sign the other end's certificate; empty: the system's authorities."""
    name: str = ""
    """The name that servers' certificates carry, if it is not the address that is called."""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise InvalidArgumentError("tls_key" if self.cert else "tls_cert", "", "must be given: both, or neither")
        for field_name in ("cert", "key", "ca"):
            self.pem(field_name)

    def pem(self, field_name: str) -> bytes | None:
        """Return the content of a file; None if the file is not given.

        Raises InvalidArgumentError if it cannot be read, or is no PEM file.
        """
        path = getattr(self, field_name)
        if not path:
            return None
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            limit = f"must be a readable file: {error.strerror}"
            raise InvalidArgumentError(f"tls_{field_name}", path, limit) from error
        if b"-----BEGIN " not in content:
            raise InvalidArgumentError(f"tls_{field_name}", path, "must be a PEM file")
        return content


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig:
    """What every process of a cluster has: for its links to the others, the paths of secrets, never a secret; and the
    ports on which it is watched."""

    tls_cert: str = ""
    """PEM file of this process's certificate, which it shows as a server and as a client."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_ca: str = ""
    """PEM file of the authorities that sign the members' certificates."""
    tls_name: str = ""
    """Name that the members' certificates carry, where it is not the name or address that is configured."""
    cluster_token_file: str = ""
    """File of the token that the members of this cluster, and nobody else, have; empty: anyone may be a member."""
    metrics_port: int | None = None
    """Port of the metrics for Prometheus, over plain HTTP; 0 picks a free one, None has no metrics."""
    metrics_host: str = "127.0.0.1"
    """Address of the metrics. Whoever reaches it may read them."""
    health_port: int | None = None
    """Port of gRPC health checks in plain text, for probes that know no TLS; it answers while the process starts, too.
    0 picks a free one, None has no such port. The main port answers health checks in any case."""
    health_host: str = "127.0.0.1"
    """Address of the port of health checks. Whoever reaches it may ask."""

    def __post_init__(self) -> None:
        _check_listen(self.metrics_host, self.metrics_port or 0, "metrics_")
        _check_listen(self.health_host, self.health_port or 0, "health_")
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        if any(files.values()) and not all(files.values()):
            missing = next(name for name, path in files.items() if not path)
            raise InvalidArgumentError(missing, "", f"must be given: TLS between members needs {', '.join(files)}")
        if self.tls_name and not self.tls_ca:
            raise InvalidArgumentError("tls_name", self.tls_name, "must be empty without tls_ca")
        _ = self.tls, self.cluster_token()  # Raises now if a file cannot be used.

    @property
    def tls(self) -> TlsConfig | None:
        """The PEM files of this process; None: no TLS."""
        if not self.tls_cert:
            return None
        return TlsConfig(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca, name=self.tls_name)

    def cluster_token(self) -> str:
        """Read the cluster's token from its file; empty if there is no file."""
        path = self.cluster_token_file
        return read_token("cluster_token_file", path) if path else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(MemberConfig):
    """A router: tokenizes, assigns seeds, queues, places, streams, fails over."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 50051
    """Port to listen on; 0 picks a free one."""
    router_id: str = ""
    """Name of this router, in its status and in logs; empty: random."""
    seed_key: str = field(default="", repr=False, metadata=SECRET)
    """A secret, so not for command lines: see seed_key_file."""
    seed_key_file: str = ""
    """File of the key of derived seeds, 8 to 64 bytes in hexadecimal; empty: that of CORUN_SEED_KEY, else random at
    start. Routers of one cluster share it, and keep it when they restart: else no other router can resume a request
    without a seed."""
    client_tokens_file: str = ""
    """File of the clients' tokens, a line each: [NAME:] TOKEN [max_requests=N] [max_priority=high|normal|low]
    [weight=N] [operator]; empty: anyone may be a client, sees what operators see, and is told apart by its host."""
    expected_fingerprint: str = ""
    """Fingerprint of the contract that the cluster must keep, 64 hexadecimal digits as `corun fingerprint` shows them:
    nodes that do not give it are not used, whoever comes first. Empty: the first node of each role decides."""
    tls_clients: bool = False
    """Clients, too, must show a certificate that tls_ca signed."""
    max_queued_samples: int = 4096
    """Samples of one client that may wait for a slot; more are refused with a retry delay. Each of n clients may have
    2 / (n + 1) of it, so that there is always room for another, and less than twice as many wait in all."""
    max_queued_tokens: int = 4_194_304
    """Prompt tokens of the samples of one client that may wait for a slot, with the same parts for several clients."""
    max_queue_wait_s: float = 60.0
    """Longest wait for a slot, in seconds, that a request may have to expect; with a longer one it is refused with a
    retry delay. Not for requests of low priority, which wait for as long as their deadline allows; 0: for none."""
    heartbeat_interval_ms: int = 1000
    """How often nodes report, in milliseconds."""
    heartbeat_timeout_ms: int = 5000
    """A node silent for so many milliseconds is lost."""
    max_attempts: int = field(default=3, metadata={"unit": "runs"})
    """Runs of one sample, the first included, that nodes may fail or be lost in before the sample is given up."""
    reserve_timeout_s: float = 5.0
    """Longest wait for a decode node to lease a slot, in seconds."""
    prefill_timeout_s: float = 300.0
    """Longest prefill, in seconds, with the wait for those ahead of it; a decode slot is held meanwhile."""
    step_timeout_s: float = 60.0
    """Longest wait for a sample's next token, in seconds."""
    node_wait_s: float = 600.0
    """Longest wait for the first nodes to join, in seconds; also of a request that no node in use has room for, for one
    that cannot be used yet: it blocks nobody meanwhile. A request's own deadline may be sooner."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Largest request, in bytes."""
    client_timeout_s: float = CLIENT_TIMEOUT_S
    """Longest that a client may take to send its request, or to take a message of the answer, in seconds; then its call
    ends with DEADLINE_EXCEEDED."""
    max_unsent_tokens: int = MAX_UNSENT_TOKENS
    """Tokens of one request that may wait for a client that reads more slowly than they are drawn; with more, the
    request ends with RESOURCE_EXHAUSTED."""
    drain_grace_s: float = 30.0
    """Time for running samples to end when the router is told to stop, in seconds."""
    share_kv: bool = True
    """Equal prompts of one client, such as several samples of one, are computed once while their KV is there. It is
    kept for those that wait for slots, up to 2 s after the last one that came and in up to a quarter of a prefill
    node's KV room. Clients without tokens are told apart by their hosts."""
    audit_fraction: float = 0.001
    """Share of the finished samples that is run again on other nodes, in idle slots, and compared by bits, in [0, 1];
    0: none."""
    audit_dir: str = ""
    """Directory for a file per difference that an audit finds, to run it again; empty: differences are only logged and
    counted. The files hold prompts of clients, so only their owner may read them; the newest 100 are kept."""

    def __post_init__(self) -> None:
        MemberConfig.__post_init__(self)
        _check_listen(self.host, self.port)
        _check_name("router_id", self.router_id)
        if self.seed_key and self.seed_key_file:
            raise InvalidArgumentError("seed_key_file", self.seed_key_file, "must be empty when seed_key is given")
        _check_seed_key(self._seed_key_hex())
        _check_fingerprint("expected_fingerprint", self.expected_fingerprint)
        self._check_clients()
        for name in (
            "max_queued_samples",
            "max_queued_tokens",
            "heartbeat_interval_ms",
            "max_attempts",
            "max_unsent_tokens",
        ):
            _check_range(name, getattr(self, name), 1, 2**32 - 1)
        _check_range("heartbeat_timeout_ms", self.heartbeat_timeout_ms, 2 * self.heartbeat_interval_ms, 2**32 - 1)
        for name in ("reserve_timeout_s", "prefill_timeout_s", "step_timeout_s", "client_timeout_s"):
            _check_seconds(name, getattr(self, name), above_zero=True)
        for name in ("max_queue_wait_s", "node_wait_s", "drain_grace_s"):
            _check_seconds(name, getattr(self, name))
        _check_range("max_message_bytes", self.max_message_bytes, 1024, 2**29)
        _check_share("audit_fraction", self.audit_fraction)
        _check_directory("audit_dir", self.audit_dir)

    @property
    def seed_key_bytes(self) -> bytes:
        """The seed key as bytes; empty if the router has to draw one."""
        return bytes.fromhex(self._seed_key_hex())

    def _seed_key_hex(self) -> str:
        return read_token("seed_key_file", self.seed_key_file) if self.seed_key_file else self.seed_key

    def _check_clients(self) -> None:
        if self.tls_clients and not self.tls_cert:
            raise InvalidArgumentError("tls_clients", True, "must be off without tls_cert, tls_key and tls_ca")
        if self.client_tokens_file and not self.cluster_token_file:
            limit = "must be given with client_tokens_file: else every client may act as a node"
            raise InvalidArgumentError("cluster_token_file", "", limit)
        _ = self.client_tokens()

    def client_tokens(self) -> tuple[ClientToken, ...]:
        """Read the clients' tokens from their file. If there are none, anyone may be a client."""
        path = self.client_tokens_file
        return read_client_tokens("client_tokens_file", path) if path else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig(MemberConfig):
    """What prefill and decode nodes have in common."""

    model: str = field(metadata=CONTRACT)
    """Path of the model's directory, or its id on the hub."""
    router: tuple[str, ...] = ("127.0.0.1:50051",)
    """Routers to join, each host:port. A name is looked up again every few seconds, and means a router at each of its
    addresses."""
    host: str = "127.0.0.1"
    """Address to listen on, and to be reached at."""
    port: int = 0
    """Port to listen on; 0 picks a free one."""
    advertise: str = ""
    """host:port at which routers reach this node, where a proxy or another network is in between; empty: where it
    listens."""
    node_id: str = ""
    """Name of this node, kept across restarts; empty: hostname-role-random."""
    dtype: str = field(default="auto", metadata=CONTRACT)
    """Type of weights and activations; auto: the model's."""
    max_model_len: int = field(default=0, metadata=CONTRACT | {"unit": "tokens"})
    """Tokens of prompt and output together; 0: the model's."""
    threads: int = field(default=0, metadata=CONTRACT)
    """CPU threads of the engine; 0: all cores."""
    kv_cache_gib: int = 1
    """Memory for KV on a CPU, in GiB. A GPU's is set by gpu_memory_utilization."""
    nixl_host: str = "127.0.0.1"
    """Address at which other nodes reach this node's NIXL agent."""
    nixl_port: int = 0
    """Port of the NIXL handshake; 0 picks a free one."""
    tensor_parallel_size: int = field(default=1, metadata=CONTRACT | {"unit": "GPUs"})
    """GPUs that share the model."""
    gpu_memory_utilization: float = field(default=0.9, metadata={"unit": "share"})
    """Share of a GPU's memory that the engine takes."""
    engine_timeout_s: float = 5.0
    """An engine that neither answers, nor steps, nor uses a CPU for so many seconds is stuck: its work runs elsewhere,
    and it gets none until it answers. Must be longer than any step on a GPU, where the CPU tells nothing."""
    engine_restart_s: float = 120.0
    """An engine that neither answers nor steps for so many seconds, even if it computes, ends the process, so that it
    is started again. Must be longer than any step."""
    drain_grace_s: float = 30.0
    """Time for running work to end when the node is told to stop, in seconds."""

    def __post_init__(self) -> None:
        MemberConfig.__post_init__(self)
        _check_listen(self.host, self.port)
        _check_listen(self.nixl_host, self.nixl_port, "nixl_")
        if self.advertise:
            _check_address("advertise", self.advertise)
        _check_name("node_id", self.node_id)
        _check_not_empty("model", self.model)
        _check_not_empty("dtype", self.dtype)
        _check_not_empty("router", self.router)
        for address in self.router:
            _check_address("router", address)
        for name in ("max_model_len", "threads"):
            _check_range(name, getattr(self, name), 0, 2**31 - 1)
        for name in ("kv_cache_gib", "tensor_parallel_size"):
            _check_range(name, getattr(self, name), 1, 2**16)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidArgumentError("gpu_memory_utilization", self.gpu_memory_utilization, "must be in (0, 1]")
        for name in ("engine_timeout_s", "engine_restart_s"):
            _check_seconds(name, getattr(self, name), above_zero=True)
        if self.engine_restart_s <= self.engine_timeout_s:
            limit = f"must be above engine_timeout_s, {self.engine_timeout_s:g}"
            raise InvalidArgumentError("engine_restart_s", self.engine_restart_s, limit)
        _check_seconds("drain_grace_s", self.drain_grace_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig(NodeConfig):
    """A prefill node: computes the KV of one prompt at a time."""

    chunk_size: int = field(default=2048, metadata=CONTRACT | {"unit": "tokens"})
    """Prompt tokens of one step; part of the contract."""
    kv_check_fraction: float = 0.01
    """Share of the prompts whose KV is compared by digest after its transfer, in [0, 1]."""

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)  # slots=True makes a new class, which breaks super().
        _check_range("chunk_size", self.chunk_size, 1, 2**20)
        _check_share("kv_check_fraction", self.kv_check_fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig(NodeConfig):
    """A decode node: draws every token, in steps of a fixed shape."""

    slots: int = field(default=0, metadata=CONTRACT | {"unit": "rows"})
    """Rows of every step; part of the contract. 0: 256 on a GPU, 8 on a CPU."""
    smaller_steps: bool = True
    """Steps of few requests have fewer rows, where the self-test has found the bits of a step of all slots."""
    prefill_first_ms: int = 100
    """Longest time between the starts of two steps, in milliseconds, while a prefill node computes on the same GPU; 0:
    they run at the same time, each at half speed."""
    lease_ttl_ms: int = 30_000
    """How long the slots that a router holds outlive its step stream, in milliseconds. While that stands, the router's
    own timeouts bound them, such as prefill_timeout_s."""

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)
        _check_range("slots", self.slots, 0, 4096)
        _check_range("prefill_first_ms", self.prefill_first_ms, 0, 10_000)
        _check_range("lease_ttl_ms", self.lease_ttl_ms, 100, 2**32 - 1)


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_listen(host: str, port: int, prefix: str = "") -> None:
    _check_not_empty(f"{prefix}host", host)
    _check_range(f"{prefix}port", port, 0, 65535)


def _check_address(field: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise InvalidArgumentError(field, address, "must be host:port")


def _check_name(field: str, name: str) -> None:
    if len(name) > 128 or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
        raise InvalidArgumentError(field, name, "must be at most 128 letters, digits, '-', '_' or '.'")


def _check_fingerprint(field: str, text: str) -> None:
    if text and (len(text) != 64 or set(text) - set("0123456789abcdef")):
        raise InvalidArgumentError(field, text, "must be 64 hexadecimal digits, in lower case, or empty")


def _check_seed_key(seed_key: str) -> None:
    try:
        size = len(bytes.fromhex(seed_key))
    except ValueError:
        size = -1
    if not 0 <= size <= 64:
        # The key itself stays out of the error: it is a secret.
        raise InvalidArgumentError(
            "seed_key", Shown(f"{len(seed_key)} characters"), "must be up to 64 bytes in hexadecimal"
        )


def _check_not_empty(field: str, value: Any) -> None:
    if not value:
        raise InvalidArgumentError(field, value, "must not be empty")


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(field, value, f"must be an integer in [{low}, {high}]")


def _check_share(field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidArgumentError(field, value, "must be in [0, 1]")


def _check_directory(field: str, path: str) -> None:
    if path and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        raise InvalidArgumentError(field, path, "must be a directory that this process may write to")


def _check_seconds(field: str, value: float, *, above_zero: bool = False) -> None:
    longest = 86_400.0
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= longest
        or (above_zero and value == 0)
    ):
        raise InvalidArgumentError(field, value, f"must be in {'(' if above_zero else '['}0, {longest:g}] seconds")
