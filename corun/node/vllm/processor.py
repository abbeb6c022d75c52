"""What a CPU is, as far as compute libraries choose kernels and block sizes by it.

oneDNN and vLLM choose kernels by CPUID beyond the level that ATen tells (AMX, AVX512-BF16), MKL also by the vendor's
model; vLLM's attention and oneDNN cut their work by the sizes of the caches, and so decide the order of sums. Two
virtual machines of one model name may differ in all of it. Must not know: torch, vLLM, contracts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
NAMES = ("model name", "Model", "Processor")
MODELS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
EXTENSIONS = {
    "flags": ("amx", "avx", "f16c", "fma", "sse"),  # x86
    "Features": ("asimd", "bf16", "fp", "i8mm", "sme", "sve"),  # Arm
}
"""By the line that lists them: how the names of vector and matrix extensions begin."""
CACHE_SIZES = (188, 191, 194)
"""glibc's _SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE and _SC_LEVEL3_CACHE_SIZE, which Python has no names for."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The first processor of a machine."""

    name: str
    features: tuple[str, ...]
    """Vector and matrix extensions, sorted."""
    caches: tuple[int, ...] = ()
    """Bytes of data in the first, second and third level; 0: not told."""


def read() -> Processor:
    """Read this machine's."""
    found = parse(CPUINFO.read_text())
    return Processor(found.name, found.features, tuple(os.sysconf(size) for size in CACHE_SIZES))


def parse(cpuinfo: str) -> Processor:
    """Read name and extensions from the text of /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return Processor(_name(fields), _features(fields))


def _name(fields: Mapping[str, str]) -> str:
    name = next((fields[name] for name in NAMES if name in fields), "")
    return ", ".join([*filter(None, [name]), *(f"{part} {fields[part]}" for part in MODELS if part in fields)])


def _features(fields: Mapping[str, str]) -> tuple[str, ...]:
    found = {
        extension
        for line, beginnings in EXTENSIONS.items()
        for extension in fields.get(line, "").split()
        if extension.startswith(beginnings)
    }
    return tuple(sorted(found))
