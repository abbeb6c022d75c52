"""The properties of a CPU by which compute libraries choose kernels and block sizes.

oneDNN and vLLM choose kernels by CPUID in more detail than ATen reports (AMX, AVX512-BF16), and MKL also by the
vendor's model. vLLM's attention and oneDNN split their work by the sizes of the caches, which decides the order of
sums. Two virtual machines with the same model name may differ in all of this. Must not know: torch, vLLM, contracts.
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
"""The prefixes of the names of vector and matrix extensions, by the line of /proc/cpuinfo that lists them."""
CACHE_SIZES = (188, 191, 194)
"""The numbers of glibc's _SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE and _SC_LEVEL3_CACHE_SIZE, which have no names
in Python."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The first processor of a machine."""

    name: str
    features: tuple[str, ...]
    """The vector and matrix extensions, sorted."""
    caches: tuple[int, ...] = ()
    """The sizes of the data caches of the first, second and third level, in bytes; 0: not known."""


def read() -> Processor:
    """Read this machine's processor."""
    found = parse(CPUINFO.read_text())
    return Processor(found.name, found.features, tuple(os.sysconf(size) for size in CACHE_SIZES))


def parse(cpuinfo: str) -> Processor:
    """Parse name and extensions from the text of /proc/cpuinfo."""
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
