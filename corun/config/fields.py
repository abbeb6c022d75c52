"""Configuration of the processes: frozen, complete and checked when made. Nothing changes it afterwards.

The metadata of a field says what is known about a setting beside its type and its meaning: the check of its value,
where `cluster.toml` has it, whether it is a path or a secret, whether it is part of the contract, and its unit if its
name does not end with one.

Secrets are in files. A config holds their paths, and making it reads no file: `check_files` does, once, when a process
starts. `corun.config.flags` turns a command line into a config. This module must not know the environment, the engines
or the services.
"""

from __future__ import annotations

import enum
import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError, Shown, renaming
from corun.params import whole_number
from corun.rpc.auth import ClientToken, read_client_tokens, read_token

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The most bytes of a message that a process accepts, by default."""
CLIENT_TIMEOUT_S = 30.0
"""The number of seconds that a server waits for a client to send or to take a message, by default."""
MAX_UNSENT_TOKENS = 65_536
"""The most tokens of one request that a router keeps for a slow reader, by default."""
SEED_KEY_VARIABLE = "CORUN_SEED_KEY"
"""The environment variable with a router's seed key. It is no flag, since everyone on a machine sees command lines."""

MAX_PROCESS_SECONDS = 86_400.0
"""The longest time that a setting may give, in seconds."""

Metadata = dict[str, Any]
Check = Callable[[str, Any], None]
"""A function of a field's name and value that raises InvalidArgumentError for a bad value."""


class Scope(enum.Enum):
    """Where a cluster gives a setting. Without a scope, a setting is in the table of its role, or in its pool's."""

    SECURITY = "belongs in [security]"
    POOL = "belongs in [pools.NAME]"
    """The setting is the same for all nodes of a pool."""
    LAUNCHER = "is for whoever starts the process, and not for a file"
    """The setting names one process or one machine."""


SECRET: Metadata = {"secret": True}
"""The metadata of a field that a command line must not set, since everyone on the machine can read command lines."""
CONTRACT: Metadata = {"contract": True}
"""The metadata of a field that enters the contract: nodes that differ in it do not serve together."""
PATH: Metadata = {"path": True}
SECURITY: Metadata = {"scope": Scope.SECURITY}
POOL: Metadata = {"scope": Scope.POOL}
LAUNCHER: Metadata = {"scope": Scope.LAUNCHER}


def checked(check: Check) -> Metadata:
    """Return the metadata of a field whose values `check` accepts."""
    return {"check": check}


def integer(low: int, high: int) -> Metadata:
    """Return the metadata of a field for integers in [low, high]."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidArgumentError(name, value, f"must be an integer in [{low}, {high}]")

    return checked(check)


def number(low: float, high: float, *, above_low: bool = False, unit: str = "") -> Metadata:
    """Return the metadata of a field for numbers in [low, high], or in (low, high] if `above_low`."""
    limit = f"must be in {'(' if above_low else '['}{low:g}, {high:g}]{unit and f' {unit}'}"

    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and low <= value <= high) or (above_low and value == low):
            raise InvalidArgumentError(name, value, limit)

    return checked(check)


def one_of(*values: str) -> Metadata:
    """Return the metadata of a field for one of these texts."""

    def check(name: str, value: Any) -> None:
        if value not in values:
            raise InvalidArgumentError(name, value, f"must be one of {', '.join(values)}")

    return checked(check)


def _check_not_empty(name: str, value: Any) -> None:
    if not value:
        raise InvalidArgumentError(name, value, "must not be empty")


def check_address(name: str, value: str) -> None:
    """Raise InvalidArgumentError unless an address, which may be empty, is host:port."""
    host, _, port = value.rpartition(":")
    if value and (not host or not 0 < (whole_number(port) or 0) <= 65535):
        raise InvalidArgumentError(name, value, "must be host:port, with a port in [1, 65535]")
    if ":" in host and not host.startswith("["):  # To gRPC all of it would be the host.
        raise InvalidArgumentError(name, value, "must be host:port, with brackets around an IPv6 address")


def _check_addresses(name: str, value: tuple[str, ...]) -> None:
    _check_not_empty(name, value)
    for address in value:
        _check_not_empty(name, address)
        check_address(name, address)


def _check_name(name: str, value: str) -> None:
    if len(value) > 128 or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in value):
        raise InvalidArgumentError(name, value, "must be at most 128 letters, digits, '-', '_' or '.'")


def _check_fingerprint(name: str, text: str) -> None:
    if text and (len(text) != 64 or set(text) - set("0123456789abcdef")):
        raise InvalidArgumentError(name, text, "must be 64 hexadecimal digits, in lower case, or empty")


def _check_seed_key(name: str, seed_key: str) -> None:
    try:
        size = len(bytes.fromhex(seed_key))
    except ValueError:
        size = -1
    if not 0 <= size <= 64:
        # The key itself stays out of the error: it is a secret.
        raise InvalidArgumentError(name, Shown(f"{len(seed_key)} characters"), "must be up to 64 bytes in hexadecimal")


ORIGIN = re.compile(r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?")
"""The address of an HTTP server without a path. No such text means anything to a browser's policy or to a shell."""


def _check_origins(name: str, origins: str) -> None:
    for origin in filter(None, origins.split(",")):
        if not ORIGIN.fullmatch(origin):
            raise InvalidArgumentError(name, origin, "must be scheme://host:port of an http or https server, no path")


NOT_EMPTY = checked(_check_not_empty)
PORT = integer(0, 65535)
COUNT = integer(1, 2**32 - 1)
FRACTION = number(0, 1)
SECONDS = number(0, MAX_PROCESS_SECONDS, unit="seconds")
SECONDS_ABOVE_0 = number(0, MAX_PROCESS_SECONDS, above_low=True, unit="seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Checks a config when it is made: each field by the check in its metadata, then all fields together."""

    def __post_init__(self) -> None:
        for known in fields(self):
            value, check = getattr(self, known.name), known.metadata.get("check")
            is_unset = value is None and known.default is None
            if check is not None and not is_unset:
                check(known.name, value)
        self.check_together()

    def check_together(self) -> None:
        """Raise InvalidArgumentError unless the fields suit each other. Read no file."""


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
class HttpConfig(Settings):
    """Where a gateway listens for HTTP."""

    host: str = field(default="127.0.0.1", metadata=NOT_EMPTY)
    """Address to listen on."""
    port: int = field(default=8000, metadata=PORT)
    """Port to listen on; 0 picks a free one."""
    https_cert: str = field(default="", metadata=PATH)
    """PEM file of the certificate to show to HTTP clients; turns TLS on for them."""
    https_key: str = field(default="", metadata=PATH)
    """PEM file of its private key."""
    allow_kills: bool = False
    """Let clients kill decode nodes in the playground, to watch their streams go on. Every client of the gateway may;
    only `corun up`, which starts the node again, can do it."""
    foreign_origins: str = field(default="", metadata=checked(_check_origins))
    """Servers of OpenAI's API that the playground's page may call, with commas in between, as in
    https://vllm.example.org:8001. The viewer's browser calls them; those on its own machine it may always."""

    @property
    def https(self) -> TlsConfig | None:
        """The certificate and key for HTTP clients, which are read; None: no TLS."""
        with renaming(lambda name: name.replace("tls", "https")):
            found = TlsConfig(cert=self.https_cert, key=self.https_key)
        return found if found.cert else None

    def check_public(self, insecure: bool) -> None:
        """Raise InvalidArgumentError if this is a public address without TLS, unless that is wanted."""
        if not (is_loopback(self.host) or self.https_cert or insecure):
            limit = "is a public address, so it needs https_cert, https_key as well; or say insecure"
            raise InvalidArgumentError("host", self.host, limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConfig:
    """What protects the links of a process to the others: the paths of secrets, never a secret."""

    tls_cert: str = field(default="", metadata=SECURITY | PATH)
    """PEM file of this process's certificate, which it shows as a server and as a client."""
    tls_key: str = field(default="", metadata=SECURITY | PATH)
    """PEM file of its private key."""
    tls_ca: str = field(default="", metadata=SECURITY | PATH)
    """PEM file of the authorities that sign the members' certificates."""
    tls_name: str = field(default="", metadata=SECURITY)
    """Name that the members' certificates carry, where it is not the name or address that is configured."""
    cluster_token_file: str = field(default="", metadata=SECURITY | PATH)
    """File of the token that the members of this cluster, and nobody else, have; empty: anyone may be a member."""

    @property
    def tls(self) -> TlsConfig | None:
        """The PEM files of this process, which are read; None: no TLS."""
        if not self.tls_cert:
            return None
        return TlsConfig(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca, name=self.tls_name)

    def cluster_token(self) -> str:
        """Read the cluster's token from its file; empty if there is no file."""
        path = self.cluster_token_file
        return read_token("cluster_token_file", path) if path else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig(Settings, LinkConfig):
    """What every process of a cluster has: what protects its links, and the ports on which it is watched."""

    metrics_port: int | None = field(default=None, metadata=PORT)
    """Port of the metrics for Prometheus and of the probes, over plain HTTP; 0 picks a free one, None has neither."""
    metrics_host: str = field(default="127.0.0.1", metadata=NOT_EMPTY)
    """Address of the metrics and probes. Whoever reaches it may read them."""

    def check_together(self) -> None:
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        if any(files.values()) and not all(files.values()):
            missing = next(name for name, path in files.items() if not path)
            raise InvalidArgumentError(missing, "", f"must be given: TLS between members needs {', '.join(files)}")
        if self.tls_name and not self.tls_ca:
            raise InvalidArgumentError("tls_name", self.tls_name, "must be empty without tls_ca")

    def check_files(self) -> None:
        """Raise InvalidArgumentError unless every file that this config names can be used."""
        _ = self.tls, self.cluster_token()


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(MemberConfig):
    """A router: tokenizes, assigns seeds, queues, places, streams, fails over."""

    host: str = field(default="127.0.0.1", metadata=NOT_EMPTY)
    """Address to listen on."""
    port: int = field(default=50051, metadata=PORT)
    """Port to listen on; 0 picks a free one."""
    router_id: str = field(default="", metadata=LAUNCHER | checked(_check_name))
    """Name of this router, in its status and in logs; empty: random."""
    seed_key: str = field(default="", repr=False, metadata=SECRET | checked(_check_seed_key))
    """A secret, so not for command lines: see seed_key_file."""
    seed_key_file: str = field(default="", metadata=PATH)
    """File of the key of derived seeds, 8 to 64 bytes in hexadecimal; empty: that of CORUN_SEED_KEY, else random at
    start. Routers of one cluster share it, and keep it when they restart: else no other router can resume a request
    without a seed."""
    client_tokens_file: str = field(default="", metadata=SECURITY | PATH)
    """File of the clients' tokens, a line each: [NAME:] TOKEN [max_requests=N] [max_priority=high|normal|low]
    [weight=N] [operator]; empty: anyone may be a client, sees what operators see, and is told apart by its host."""
    expected_fingerprint: str = field(default="", metadata=checked(_check_fingerprint))
    """Fingerprint of the contract that the cluster must keep, 64 hexadecimal digits as `corun fingerprint` shows them:
    nodes that do not give it are not used, whoever comes first. Empty: the first node of each role decides."""
    tls_clients: bool = field(default=False, metadata=SECURITY)
    """Clients, too, must show a certificate that tls_ca signed."""
    reflection: bool = False
    """Tell clients the services that they may call, and their messages, by gRPC's reflection (v1alpha), so that tools
    such as grpcurl need no proto files. It wants a client's token, like the services themselves."""
    max_queued_samples: int = field(default=4096, metadata=COUNT)
    """Samples of one client that may wait for room; more are refused with a retry delay. Each of n clients may have
    2 / (n + 1) of it, so that there is always room for another, and less than twice as many wait in all."""
    max_queued_tokens: int = field(default=4_194_304, metadata=COUNT)
    """Prompt tokens of the samples of one client that may wait for room, with the same parts for several clients."""
    max_queue_wait_s: float = field(default=60.0, metadata=SECONDS)
    """Longest wait for room, in seconds, that a request may have to expect; with a longer one it is refused with a
    retry delay. Not for requests of low priority, which wait for as long as their deadline allows; 0: for none."""
    heartbeat_interval_ms: int = field(default=1000, metadata=COUNT)
    """How often nodes report, in milliseconds."""
    heartbeat_timeout_ms: int = field(default=5000, metadata=COUNT)
    """A node silent for so many milliseconds is lost."""
    max_attempts: int = field(default=3, metadata=COUNT | {"unit": "runs"})
    """Runs of one sample, the first included, that nodes may fail or be lost in before the sample is given up. A
    run does not count if its node had been told to end."""
    reserve_timeout_s: float = field(default=5.0, metadata=SECONDS_ABOVE_0)
    """Longest wait for a decode node to lease room, in seconds."""
    prefill_timeout_s: float = field(default=300.0, metadata=SECONDS_ABOVE_0)
    """Longest time, in seconds, in which a prefill node computes no prompt while one of this router waits there. KV
    room of a decode node is held meanwhile; the request's deadline bounds the whole wait."""
    step_timeout_s: float = field(default=60.0, metadata=SECONDS_ABOVE_0)
    """Longest wait for a sample's KV to be read, and for its next token, in seconds. Once its KV is there, the wait for
    the first token does not count while all slots of its node are in use."""
    node_wait_s: float = field(default=600.0, metadata=SECONDS)
    """Longest wait for the first nodes to join, in seconds; also of a request that no node in use has room for, for one
    that cannot be used yet: it blocks nobody meanwhile. A request's own deadline may be sooner."""
    max_message_bytes: int = field(default=MAX_MESSAGE_BYTES, metadata=integer(1024, 2**29))
    """Largest request, in bytes."""
    client_timeout_s: float = field(default=CLIENT_TIMEOUT_S, metadata=SECONDS_ABOVE_0)
    """Longest that a client may take to send its request, or to take a message of the answer, in seconds; then its call
    ends with DEADLINE_EXCEEDED."""
    max_unsent_tokens: int = field(default=MAX_UNSENT_TOKENS, metadata=COUNT)
    """Tokens of one request that may wait for a client that reads more slowly than they are drawn; with more, the
    request ends with RESOURCE_EXHAUSTED."""
    drain_grace_s: float = field(default=30.0, metadata=SECONDS)
    """Time for running samples to end when the router is told to stop, in seconds."""
    share_kv: bool = True
    """Equal prompts of one client, such as several samples of one, are computed once while their KV is there. It is
    kept for those that wait for room, up to 2 s after the last one that came and in up to a quarter of a prefill
    node's KV room. Without it, no prompt uses the prefix cache of a prefill node either. Clients without tokens are
    told apart by their hosts."""
    ttft_target_ms: int = field(default=0, metadata=integer(0, 2**32 - 1))
    """Target for a request's first token, in milliseconds: while prompts would have to wait for longer, some colocated
    nodes take prompts only, until they wait for less than half of it. 0: none."""
    tpot_target_ms: int = field(default=0, metadata=integer(0, 2**32 - 1))
    """Target for each further token, in milliseconds: a colocated node whose steps last longer while prompts are in
    them gets prompts only where no other node may take them. 0: none."""
    audit_fraction: float = field(default=0.001, metadata=FRACTION)
    """Share of the finished samples that is run again on other nodes, in idle slots, and compared by bits, in [0, 1];
    0: none."""
    audit_dir: str = field(default="", metadata=PATH)
    """Directory for a file per difference that an audit finds, to run it again; empty: differences are only logged and
    counted. The files hold prompts of clients, so only their owner may read them; the newest 100 are kept."""

    def check_together(self) -> None:
        MemberConfig.check_together(self)  # slots=True makes a new class, which breaks super().
        if self.seed_key and self.seed_key_file:
            raise InvalidArgumentError("seed_key_file", self.seed_key_file, "must be empty when seed_key is given")
        if self.tls_clients and not self.tls_cert:
            raise InvalidArgumentError("tls_clients", True, "must be off without tls_cert, tls_key and tls_ca")
        if self.client_tokens_file and not self.cluster_token_file:
            limit = "must be given with client_tokens_file: else every client may act as a node"
            raise InvalidArgumentError("cluster_token_file", "", limit)
        integer(2 * self.heartbeat_interval_ms, 2**32 - 1)["check"]("heartbeat_timeout_ms", self.heartbeat_timeout_ms)

    def check_files(self) -> None:
        MemberConfig.check_files(self)
        _ = self.client_tokens(), self.seed_key_bytes
        path = self.audit_dir
        if path and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
            raise InvalidArgumentError("audit_dir", path, "must be a directory that this process may write to")

    @property
    def seed_key_bytes(self) -> bytes:
        """The seed key as bytes, from its file if it has one; empty if the router has to draw one."""
        seed_key = read_token("seed_key_file", self.seed_key_file) if self.seed_key_file else self.seed_key
        _check_seed_key("seed_key", seed_key)
        return bytes.fromhex(seed_key)

    def client_tokens(self) -> tuple[ClientToken, ...]:
        """Read the clients' tokens from their file. If there are none, anyone may be a client."""
        path = self.client_tokens_file
        return read_client_tokens("client_tokens_file", path) if path else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig(MemberConfig):
    """What prefill and decode nodes have in common."""

    model: str = field(metadata=CONTRACT | POOL | NOT_EMPTY)
    """Path of the model's directory, its id on the hub, or a name: tiny, smollm2."""
    router: tuple[str, ...] = field(default=("127.0.0.1:50051",), metadata=LAUNCHER | checked(_check_addresses))
    """Routers to join, each host:port. A name is looked up again every few seconds, and means a router at each of its
    addresses."""
    host: str = field(default="127.0.0.1", metadata=LAUNCHER | NOT_EMPTY)
    """Address to listen on, and to be reached at."""
    port: int = field(default=0, metadata=PORT)
    """Port to listen on; 0 picks a free one."""
    advertise: str = field(default="", metadata=LAUNCHER | checked(check_address))
    """host:port at which routers reach this node, where a proxy or another network is in between; empty: where it
    listens."""
    node_id: str = field(default="", metadata=LAUNCHER | checked(_check_name))
    """Name of this node, kept across restarts; empty: hostname-role-random."""
    dtype: str = field(default="auto", metadata=CONTRACT | POOL | NOT_EMPTY)
    """Type of weights and activations; auto: the model's."""
    max_model_len: int = field(default=0, metadata=CONTRACT | POOL | integer(0, 2**31 - 1) | {"unit": "tokens"})
    """Tokens of prompt and output together; 0: the model's."""
    threads: int = field(default=0, metadata=CONTRACT | integer(0, 2**31 - 1))
    """CPU threads of the engine; 0: all cores."""
    kv_cache_gib: int = field(default=1, metadata=integer(1, 2**16))
    """Memory for KV on a CPU, in GiB. A GPU's is set by gpu_memory_utilization."""
    nixl_host: str = field(default="127.0.0.1", metadata=LAUNCHER | NOT_EMPTY)
    """Address at which other nodes reach this node's NIXL agent."""
    nixl_port: int = field(default=0, metadata=PORT)
    """Port of the NIXL handshake; 0 picks a free one."""
    tensor_parallel_size: int = field(default=1, metadata=CONTRACT | POOL | integer(1, 2**16) | {"unit": "GPUs"})
    """GPUs that share the model."""
    gpu_memory_utilization: float = field(default=0.9, metadata=number(0, 1, above_low=True) | {"unit": "share"})
    """Share of a GPU's memory that the engine takes."""
    engine_timeout_s: float = field(default=5.0, metadata=SECONDS_ABOVE_0)
    """An engine that neither answers, nor steps, nor uses a CPU for so many seconds is stuck: its work runs elsewhere,
    and it gets none until it answers. Must be longer than any step on a GPU, where the CPU tells nothing."""
    engine_restart_s: float = field(default=120.0, metadata=SECONDS_ABOVE_0)
    """An engine that neither answers nor steps for so many seconds, even if it computes, ends the process, so that it
    is started again. Must be longer than any step."""
    drain_grace_s: float = field(default=30.0, metadata=SECONDS)
    """Time for running work to end when the node is told to stop, in seconds."""
    prefix_caching: bool = True
    """KV is kept for later prompts of the same client that begin alike, as long as its room is not needed."""
    keep_certificates: bool = True
    """A node on a GPU keeps its certificate in the user's cache, and its next start does not test again what it found
    with the same contract, settings, GPU and code."""

    def check_together(self) -> None:
        MemberConfig.check_together(self)
        if self.engine_restart_s <= self.engine_timeout_s:
            limit = f"must be above engine_timeout_s, {self.engine_timeout_s:g}"
            raise InvalidArgumentError("engine_restart_s", self.engine_restart_s, limit)


@dataclass(frozen=True, kw_only=True)  # Without slots, so that a class can have both roles' settings.
class PrefillConfig(NodeConfig):
    """A prefill node: computes the KV of prompts."""

    chunk_size: int = field(default=2048, metadata=CONTRACT | integer(1, 2**20) | {"unit": "tokens"})
    """Most tokens of one prompt in a step; part of the contract."""
    kv_check_fraction: float = field(default=0.001, metadata=FRACTION)
    """Share of the prompts whose KV is compared by digest after its transfer, in [0, 1]. Those that were packed, cut or
    cached are also computed again, alone, when no prompt waits, and compared. A check holds a busy GPU up for some
    50 ms."""
    packed_prefill: bool = True
    """Steps have chunks of several prompts, where the node's certificate says that this moves no bit."""
    free_chunks: bool = True
    """Prompts are cut into chunks anywhere, where the node's certificate says that this moves no bit."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(NodeConfig):
    """A decode node: draws every token, in steps of a fixed shape."""

    slots: int = field(default=0, metadata=CONTRACT | integer(0, 4096) | {"unit": "rows"})
    """Rows of every step; part of the contract. 0: 256 on a GPU, 8 on a CPU."""
    decode_split: str = field(default="none", metadata=CONTRACT | one_of("none", "own-length"))
    """How attention cuts the KV of a row; part of the contract. none: not at all. own-length: by the row's own length,
    2048 tokens a piece and at most 16 pieces, which is faster for few requests with long contexts; GPU only."""
    smaller_steps: bool = True
    """Steps of few requests have fewer rows, where the self-test has found the bits of a step of all slots."""
    prefill_first_ms: int = field(default=100, metadata=integer(0, 10_000))
    """Longest time between the starts of two steps, in milliseconds, while a prefill node computes on the same GPU; 0:
    they run at the same time, each at half speed."""
    lease_ttl_ms: int = field(default=30_000, metadata=integer(100, 2**32 - 1))
    """How long the leases that a router holds outlive its step stream, in milliseconds. While that stands, the router's
    own timeouts and its requests' deadlines bound them."""


@dataclass(frozen=True, kw_only=True)
class ColocatedConfig(PrefillConfig, DecodeConfig):
    """A colocated node: a prefill node and a decode node with one engine."""

    mixed_steps: bool = True
    """Decode rows ride in prefill steps, where the node's certificate says that this moves no bit; otherwise the two
    kinds of steps take turns, as they do with decode_split = own-length."""


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
