"""The contract: every fact that can change a bit of the output, and its fingerprint.

Two nodes with equal fingerprints give equal bits. A prefill and a decode node share the model part; each pins its own
role part. This module must not know how a fact is observed, and holds text, integers and truth values only: there is
one way to write those down, and none for a float.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from corun.errors import ContractMismatchError, InvalidArgumentError
from corun.types import NodeRole

ABSENT = "(absent)"
"""Stands for a field that one of two contracts does not have."""
_MAX_INT = 2**53 - 1
"""What every JSON reader takes exactly."""


class _Part:
    """Checks that each field has exactly its declared type: a value of another one would hash differently."""

    __slots__ = ()

    def __post_init__(self) -> None:
        part = type(self).__name__.removesuffix("Contract").lower()
        for field in fields(self):  # type: ignore[arg-type]  # Every subclass is a dataclass.
            _check(f"contract.{part}.{field.name}", str(field.type), getattr(self, field.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelContract(_Part):
    """What prefill and decode nodes of one cluster share."""

    weights_digest: str
    """Over the tensors as loaded."""
    tokenizer_digest: str
    tokenizers: str
    """Version of the library that turns text into tokens; routers use the same."""
    config_digest: str
    """Over config.json and the files beside it that the engine reads like it."""
    dtype: str
    quantization: str
    kv_cache_dtype: str
    block_size: int
    """Tokens per KV block."""
    max_model_len: int
    """Tokens."""
    tensor_parallel_size: int
    engine: str
    """Name and version of the engine."""
    torch: str
    kernels: tuple[str, ...]
    """Names and versions of the libraries that compute, or that read a model's files."""
    plugins: tuple[str, ...]
    """The engine's plugins that are installed: group, name, object, and the distribution with its version."""
    device: str
    driver: str
    cuda: str
    cpu_isa: str
    cpu_features: tuple[str, ...]
    """Vector and matrix extensions, sorted; empty beside a GPU, like the next two."""
    cpu_caches: tuple[int, ...]
    """Bytes of data in each level: kernels cut their work by them."""
    threads: int
    """CPU threads of the engine; 0 beside a GPU, where they compute nothing."""
    blas_policy: str
    """How matrix products are computed."""
    environment: tuple[str, ...]
    """Variables that are set, may move a bit and are not pinned, as "NAME=value"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillContract(_Part):
    """What decides the shapes and kernels of a prefill."""

    attention_backend: str
    runner: str
    chunk_size: int
    """Prompt tokens of one step."""
    buckets: tuple[int, ...]
    """Lengths that a step is padded to; empty: none."""
    split_policy: str
    multiprocessors: int
    """Of the GPU, as many as the process sees: fewer under MPS or MIG. 0 on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeContract(_Part):
    """What decides the shape and kernels of a decode step."""

    attention_backend: str
    runner: str
    sampler: str
    """Name and version of the sampler."""
    slots: int
    """Rows of every step."""
    split_policy: str
    graph: str
    multiprocessors: int
    """As in `PrefillContract`; nodes of the two roles may have different shares of a GPU."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output, ascending; generation_config.json decides which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """One node's contract: the model part and the part of its role. `role` may be given by its value."""

    role: NodeRole
    model: ModelContract
    prefill: PrefillContract | None = None
    decode: DecodeContract | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "role", NodeRole(self.role))
        except ValueError:
            raise InvalidArgumentError("contract.role", self.role, "must be prefill or decode") from None
        for role, part in ((NodeRole.PREFILL, self.prefill), (NodeRole.DECODE, self.decode)):
            if (part is not None) != (role is self.role):
                limit = f"must be {'set' if role is self.role else 'unset'} for a {self.role.value} node"
                raise InvalidArgumentError(f"contract.{role.value}", part, limit)

    def canonical_json(self) -> str:
        """Sorted keys, no spaces, no escapes beyond JSON's own: the same text everywhere, for the same facts."""
        return _canonical(self._values())

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON in UTF-8; 64 hex digits."""
        return _sha256(self.canonical_json())

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """Back from `canonical_json`. Raises InvalidArgumentError for a missing, unknown or mistyped field."""
        values = _load(text)
        _check_keys("contract", cls, values, optional={"prefill", "decode"})
        parts = {name: _read_part(name, part, values[name]) for name, part in _PARTS.items() if name in values}
        return cls(role=values["role"], **parts)

    def _values(self) -> dict[str, Any]:
        parts = {name: getattr(self, name) for name in _PARTS}
        return {"role": self.role.value, **{k: _part_values(part) for k, part in parts.items() if part is not None}}


def diff(a: Contract, b: Contract) -> dict[str, tuple[str, str]]:
    """The fields in which two contracts differ, by dotted name, each with both values as text."""
    return _differences(_flat(a._values()), _flat(b._values()))


def pair_fingerprint(prefill: Contract, decode: Contract) -> str:
    """The fingerprint of a cluster: SHA-256 over the shared model part and both role parts; 64 hex digits.

    Raises ContractMismatchError if the model parts differ, InvalidArgumentError if a contract has the wrong role.
    """
    for role, contract in ((NodeRole.PREFILL, prefill), (NodeRole.DECODE, decode)):
        if contract.role is not role:
            raise InvalidArgumentError("contract.role", contract.role.value, f"must be {role.value}")
    values, other = prefill._values(), decode._values()
    if differences := _differences(_flat({"model": values["model"]}), _flat({"model": other["model"]})):
        raise ContractMismatchError("the prefill and decode nodes do not run the same model", differences)
    return _sha256(_canonical({"model": values["model"], "prefill": values["prefill"], "decode": other["decode"]}))


_PARTS: dict[str, type[Any]] = {"model": ModelContract, "prefill": PrefillContract, "decode": DecodeContract}


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
        raise InvalidArgumentError(name, value, "must be printable")  # And so valid Unicode.


def _canonical(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _part_values(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(part)}


def _load(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError("contract", text, f"must be JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is given twice")
    return values


def _read_part(name: str, part: type[Any], values: Any) -> Any:
    _check_keys(f"contract.{name}", part, values)
    return part(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _check_keys(name: str, cls: type[Any], values: Any, optional: set[str] | None = None) -> None:
    if not isinstance(values, dict):
        raise InvalidArgumentError(name, values, "must be an object")
    known = {field.name for field in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise InvalidArgumentError(f"{name}.{unknown[0]}", values[unknown[0]], "is not a known field")
    if missing := sorted(known - set(values) - (optional or set())):
        raise InvalidArgumentError(f"{name}.{missing[0]}", None, "must be set")


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Dotted names to texts."""
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
