"""The contract: every fact that can change a bit of the output, and its fingerprint.

Two nodes with equal fingerprints give equal bits. A prefill and a decode node share the model part; each pins its own
role part. A contract holds text, integers and truth values only: each of these can be written down in exactly one way,
which a float cannot. This module must not know how a fact is observed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from corun import strict_json
from corun.errors import ContractMismatchError, InvalidArgumentError
from corun.types import NodeRole, from_plain

CONTRACT_VERSION = 12
"""The version of the contract's form: of its fields, and of the rules that the cluster's own code gives names to.

It grows with each change of this project after which equal nodes have other fingerprints. CHANGELOG.md has a table of
all versions. It is no part of the fingerprint, which tells the same in full."""
ABSENT = "(absent)"
"""The text that stands for a field that one of two contracts does not have."""
_MAX_INT = 2**53 - 1
"""The largest integer that every JSON reader reads exactly."""


class _Part:
    """Checks that each field has exactly its declared type, since a value of another type would hash differently."""

    __slots__ = ()

    def __post_init__(self) -> None:
        part = type(self).__name__.removesuffix("Contract").lower()
        for field in fields(self):  # type: ignore[arg-type]  # Every subclass is a dataclass.
            _check(f"contract.{part}.{field.name}", str(field.type), getattr(self, field.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelContract(_Part):
    """The facts that prefill and decode nodes of one cluster share."""

    weights_digest: str
    """The digest of the tensors as they were loaded."""
    tokenizer_digest: str
    tokenizers: str
    """The version of the library that turns text into tokens. Routers use the same version."""
    config_digest: str
    """The digest of config.json and of the other configuration files beside it that the engine reads."""
    dtype: str
    quantization: str
    kv_cache_dtype: str
    block_size: int
    """The number of tokens per KV block."""
    max_model_len: int
    """The most tokens of a prompt and its output together."""
    tensor_parallel_size: int
    engine: str
    """The name and version of the engine."""
    torch: str
    kernels: tuple[str, ...]
    """The names and versions of the libraries that compute, or read a model's files, and the compiler's settings."""
    plugins: tuple[str, ...]
    """The installed plugins of the engine: for each its group, name, object, and distribution with version."""
    device: str
    driver: str
    cuda: str
    cpu_isa: str
    cpu_features: tuple[str, ...]
    """The vector and matrix extensions of the CPU, sorted. Empty on a node with a GPU."""
    cpu_caches: tuple[int, ...]
    """The size of each level of the data cache in bytes: kernels split their work by it. Empty on a node with a GPU."""
    threads: int
    """The number of CPU threads of the engine. 0 on a node with a GPU, where they compute nothing."""
    blas_policy: str
    """How matrix products are computed."""
    environment: tuple[str, ...]
    """The environment variables that are set, may change a bit and are not pinned, each as "NAME=value"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillContract(_Part):
    """The facts that decide the shapes and kernels of a prefill."""

    attention_backend: str
    runner: str
    chunk_size: int
    """The number of prompt tokens of one step."""
    buckets: tuple[int, ...]
    """The lengths that a step is padded to. Empty: steps are not padded."""
    split_policy: str
    """How attention cuts KV into pieces that it sums apart."""
    multiprocessors: int
    """The number of the GPU's multiprocessors that the process sees; MPS and MIG reduce it. 0 on a CPU."""
    traced_tokens: int
    """The most tokens of a step as the compiler was told, which chooses kernels by it. 0: nothing is compiled."""
    scorer: str
    """How tokens are scored: a name with a version, and the number of rows of the last matrix product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeContract(_Part):
    """The facts that decide the shape and kernels of a decode step."""

    attention_backend: str
    runner: str
    sampler: str
    """The name and version of the sampler."""
    slots: int
    """The number of rows of every step."""
    split_policy: str
    """The same as in `PrefillContract`."""
    graph: str
    multiprocessors: int
    """The same as in `PrefillContract`. Nodes of the two roles may have different shares of a GPU."""
    traced_tokens: int
    """The same as in `PrefillContract`."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end an output, ascending. generation_config.json says which they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One node's contract: the model part and the part of its role. Raises InvalidArgumentError for another part."""

    role: NodeRole
    model: ModelContract
    prefill: PrefillContract | None = None
    decode: DecodeContract | None = None

    def __post_init__(self) -> None:
        for role, part in ((NodeRole.PREFILL, self.prefill), (NodeRole.DECODE, self.decode)):
            if (part is not None) != (role is self.role):
                limit = f"must be {'set' if role is self.role else 'unset'} for a {self.role.value} node"
                raise InvalidArgumentError(f"contract.{role.value}", part, limit)

    def canonical_json(self) -> str:
        """Return the contract as JSON: sorted keys, no spaces, no escapes that JSON does not need.

        Equal facts give the same text everywhere.
        """
        return _canonical_json(self._values())

    def fingerprint(self) -> str:
        """Return the SHA-256 of the canonical JSON in UTF-8, as 64 hex digits."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """Read what `canonical_json` wrote. Raises InvalidArgumentError for a missing, unknown or mistyped field."""
        try:
            values = strict_json.loads(text, object_pairs_hook=strict_json.unique)
        except ValueError as error:
            raise InvalidArgumentError("contract", text, f"must be JSON: {error}") from None
        contract: Contract = from_plain("contract", cls, values)
        return contract

    def _values(self) -> dict[str, Any]:
        parts = {name: part for name, part in asdict(self).items() if part is not None}
        return {**parts, "role": self.role.value}


def diff(a: Contract, b: Contract) -> dict[str, tuple[str, str]]:
    """Return the fields in which two contracts differ: dotted name to both values as text."""
    return _differences(_flat(a._values()), _flat(b._values()))


def pair_fingerprint(prefill: Contract, decode: Contract) -> str:
    """Return the fingerprint of a cluster: SHA-256 over the shared model part and both role parts, as 64 hex digits.

    Raises ContractMismatchError if the model parts differ, and InvalidArgumentError if a contract has the wrong role.
    """
    for role, contract in ((NodeRole.PREFILL, prefill), (NodeRole.DECODE, decode)):
        if contract.role is not role:
            raise InvalidArgumentError("contract.role", contract.role.value, f"must be {role.value}")
    values, other = prefill._values(), decode._values()
    if differences := _differences(_flat({"model": values["model"]}), _flat({"model": other["model"]})):
        raise ContractMismatchError("the prefill and decode nodes do not run the same model", differences)
    pair = _canonical_json({"model": values["model"], "prefill": values["prefill"], "decode": other["decode"]})
    return hashlib.sha256(pair.encode()).hexdigest()


def _check(name: str, kind: str, value: object) -> None:
    if kind.startswith("tuple["):
        if type(value) is not tuple:
            raise InvalidArgumentError(name, value, "must be a tuple")
        for item in value:
            _check(name, kind.removeprefix("tuple[").removesuffix(", ...]"), item)
        return
    if type(value).__name__ != kind:
        raise InvalidArgumentError(name, value, f"must be {kind}")
    if isinstance(value, int) and abs(value) > _MAX_INT:
        raise InvalidArgumentError(name, value, f"must be at most {_MAX_INT}")
    if isinstance(value, str) and not value.isprintable():
        raise InvalidArgumentError(name, value, "must be printable")  # Printable text is valid Unicode, too.


def _canonical_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested values as one level: dotted name to text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": text for name, text in _flat(value).items()})
        else:
            flat[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (a.get(name, ABSENT), b.get(name, ABSENT)) for name in sorted(set(a) | set(b))}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
