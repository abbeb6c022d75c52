"""Who may import whom, read from the sources, and what an import really loads."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("corun", "router", "prefill_node", "decode_node", "colocated_node", "corun_bench")
ENGINE = ("torch", "vllm", "nixl", "transformers")
"""What only node processes load."""
WATCH = ("prometheus_client", "opentelemetry")
"""What only the processes of a cluster load."""
GENERATED = "corun/v1/"
_KERNELS = ("attention", "functions", "invariance", "worker")
BENCH_ENGINE = {"corun_bench/engine.py", *(f"corun_bench/kernels/{name}.py" for name in _KERNELS)}
"""What of the benchmark may load torch or vLLM."""


@dataclass(frozen=True)
class Rule:
    """None of the files under `files`, but those under `but`, imports anything of `forbidden`."""

    files: tuple[str, ...]
    forbidden: tuple[str, ...]
    but: tuple[str, ...] = ()


def corun(*names: str) -> tuple[str, ...]:
    """Folders of the package by their import names."""
    return tuple(f"corun.{name}" for name in names)


NODES = ("prefill_node", "decode_node", "colocated_node")
NODE_FILES = tuple(f"{name}/" for name in NODES)
PROCESSES = ("router", *NODES)
VOCABULARY = tuple(f"corun/{name}.py" for name in ("contract", "params", "receipt", "room", "types"))
ABOVE = ("client", "node", "launch", "gateway", "cli")
"""Folders that use the other folders of the package."""
PURE_LAUNCH = ("members", "placement")
RULES = {
    # The house, from top to bottom: the benchmark, the processes, the package.
    "the benchmark stands above the processes": Rule(("corun/", "router/", *NODE_FILES), ("corun_bench",)),
    "corun is for everybody": Rule(("corun/",), PROCESSES, ("corun/testing/",)),
    "nobody needs what tests use": Rule(("corun/", "router/", *NODE_FILES), corun("testing"), ("corun/testing/",)),
    "only nodes load engines": Rule(("corun/",), (*ENGINE, "tokenizers"), ("corun/node/",)),
    "a router computes nothing": Rule(("router/",), (*ENGINE, "ray", *NODES, *corun("launch", "client", "node"))),
    "a prefill node stands alone": Rule(
        ("prefill_node/",), ("ray", "tokenizers", "router", "decode_node", "colocated_node")
    ),
    "a decode node stands alone": Rule(
        ("decode_node/",), ("ray", "tokenizers", "router", "prefill_node", "colocated_node")
    ),
    "a colocated node is made of both": Rule(("colocated_node/",), ("ray", "tokenizers", "router")),
    "nodes do not know who starts or calls them": Rule(NODE_FILES, corun("launch", "client", "cli", "gateway")),
    # The package, a line a folder: what it must not know of the others.
    "vocabulary": Rule(
        VOCABULARY, ("grpc", "google", "asyncio", *corun("v1", "rpc", "config", "records", "observe", *ABOVE))
    ),
    "errors": Rule(("corun/errors.py",), ("asyncio", *corun("v1", "rpc", "config", "records", "observe", *ABOVE))),
    "client": Rule(("corun/client/",), corun("node", "launch", "gateway", "cli", "models")),
    "config": Rule(("corun/config/",), ("grpc", "asyncio", "subprocess", *corun("records", "observe", *ABOVE))),
    "rpc": Rule(("corun/rpc/",), corun(*ABOVE)),
    "observe": Rule(("corun/observe/",), corun("records", "models", *ABOVE)),
    "records": Rule(("corun/records/",), ("grpc", "asyncio", *corun("v1", "rpc", "config", "observe", *ABOVE))),
    "models": Rule(("corun/models/",), ("grpc", "asyncio", "subprocess", *corun("rpc", "config", "records", *ABOVE))),
    "node": Rule(("corun/node/",), ("ray", "tokenizers", *corun("client", "launch", "gateway", "cli", "records"))),
    "launch": Rule(("corun/launch/",), corun("node", "gateway", "cli", "records")),
    "gateway": Rule(("corun/gateway/",), corun("node", "launch", "cli", "models")),
    "cli": Rule(("corun/cli/",), corun("node")),
    "testing": Rule(("corun/testing/",), ("ray", *corun("launch", "gateway", "cli", "client", "models"))),
    # Pure parts of folders.
    "what is wanted of a cluster is known without running it": Rule(
        tuple(f"corun/launch/{name}.py" for name in PURE_LAUNCH),
        ("ray", "grpc", "asyncio", "subprocess", "corun.launch.runtime", "corun.launch.fleet", "corun.client"),
    ),
    "a simulation has no clock and draws nothing": Rule(
        ("corun_bench/simulation.py",), ("asyncio", "time", "random", "corun_bench.rates", "corun_bench.plan")
    ),
    "capacity, order and draws know no wire": Rule(
        ("decode_node/slots.py", "decode_node/sampling.py", "router/placement.py", "router/flexing.py"),
        ("grpc", "asyncio", "corun.rpc", "corun.v1", "vllm"),
    ),
}


@functools.lru_cache
def trees() -> dict[str, ast.Module]:
    """Every hand-written module, parsed, by its path from the root."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path.relative_to(ROOT).as_posix(): path for path in files}
    return {
        name: ast.parse(path.read_text(encoding="utf-8"))
        for name, path in names.items()
        if not name.startswith(GENERATED)
    }


@functools.lru_cache
def modules() -> dict[str, frozenset[str]]:
    """What every hand-written module imports, by its path from the root."""
    return {name: imports(name, tree) for name, tree in trees().items()}


def imports(name: str, tree: ast.Module) -> frozenset[str]:
    """Full names of all that a module imports, anywhere in it: in functions, for types only, by `import_module`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.removesuffix(".py").split("/")[: -node.level] if node.level else []
            origin = ".".join([*package, *([node.module] if node.module else [])])
            found.update(f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
            found.update(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
    return frozenset(found)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_of(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def importers(package: str) -> set[str]:
    return {name for name, imported in modules().items() if any(is_of(module, [package]) for module in imported)}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rule(rule: Rule) -> None:
    concerned = {
        name: imported
        for name, imported in modules().items()
        if name.startswith(rule.files) and not name.startswith(rule.but)
    }
    assert all(any(name.startswith(files) for name in concerned) for files in rule.files), "a rule about nothing"
    broken = [
        f"{name} imports {module}"
        for name, imported in concerned.items()
        for module in sorted(imported)
        if is_of(module, rule.forbidden)
    ]
    assert broken == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not for types only or inside of functions: a circle is one idea in two files."""
    assert circles(graph()) == []


def graph() -> dict[str, set[str]]:
    """Which of our modules each imports, by dotted names. A package's own module is its `__init__`."""
    names = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in modules()}
    return {
        one: {_module_of(imported, names) for imported in modules()[file]} - {"", one} for one, file in names.items()
    }


def _module_of(imported: str, names: Mapping[str, str]) -> str:
    """The module that has an imported name: itself, or where it was defined; empty if it is not ours."""
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in names), "")


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Modules that can reach themselves, those of one circle together."""
    reached = {one: set(others) for one, others in graph.items()}
    for middle in graph:
        for one in graph:
            if middle in reached[one]:
                reached[one] |= reached[middle]
    found = [{other for other in reached[one] if one in reached[other]} for one in graph if one in reached[one]]
    return [circle for i, circle in enumerate(found) if circle not in found[:i]]


def test_the_finder_of_circles_finds_them() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
    assert circles({"a": {"b"}, "b": set()}) == []


WHERE = {
    "ray": {"corun/launch/runtime.py"},
    "tokenizers": {"router/text.py"},
    "opentelemetry": {"corun/observe/tracing.py"},
    "prometheus_client": {"metrics"},
    "vllm": {"engine", "start", "scheduler", "worker", "attention", "connector", "selftest", "masks", "gate", "graphs"},
    "llguidance": {"grammar"},
    "torch": {"engine", "start", "worker", "attention", "selftest", "blas", "certify", "sampling", "switches"}
    | {"digest", "logprobs", "masks", "logprob_kernels", "scoring"},
    **{package: set() for package in ("pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml")},
}
"""The files, or the names of files, that may import each package. The workarounds for vLLM's bugs aside: each is a file
of its own, with the bug that it is for and when it goes."""


@pytest.mark.parametrize("package", WHERE)
def test_a_package_is_touched_where_its_work_is(package: str) -> None:
    files = {name for name in importers(package) - BENCH_ENGINE if package != "vllm" or "/workarounds/" not in name}
    assert {name for name in files if not {name, Path(name).stem} & WHERE[package]} == set()
    assert bool(files) == bool(WHERE[package])


def test_the_benchmark_touches_engines_where_kernels_are() -> None:
    found = {name for package in ENGINE for name in importers(package) if name.startswith("corun_bench/")}
    assert found <= BENCH_ENGINE


def test_nothing_is_evaluated() -> None:
    calls = {name: {_called(n) for n in ast.walk(tree) if isinstance(n, ast.Call)} for name, tree in trees().items()}
    # `model.eval` and the like are methods of torch; there is none so far.
    assert {name for name, called in calls.items() if called & {"eval", "exec"}} == set()


def test_messages_stay_at_the_edges() -> None:
    """Values cross inside; messages exist in `codec`, in services and in the clients of services."""
    allowed = {"codec", "service", "client", "outputs", "request", "node_client", "membership", "__main__", "app"}
    allowed |= {"nodes"}  # In `corun.testing`, which only adds services to servers.
    allowed |= {"fake_node"}  # A service of the benchmark.
    files = importers("corun.v1")
    assert "corun/rpc/codec.py" in files
    assert {Path(name).stem for name in files} <= allowed
    for name in files:
        if Path(name).name in {"__main__.py", "app.py"} or name == "corun/testing/nodes.py":
            assert {m for m in modules()[name] if is_of(m, ["corun.v1"]) and not m.endswith("_grpc")} == set()


LOADS = {
    "corun": (
        *(*ENGINE, *WATCH, "ray", "tokenizers", "numpy", "router", *NODES, "corun.node"),
        *("tyro", "rich", "grpc_health.v1", "corun.cli", "corun.rpc.server"),
    ),
    "corun.cli": (*ENGINE, *WATCH, "ray", "tokenizers", "numpy", "router", *NODES, "corun.node"),
    "corun_bench.cli": (*ENGINE, "ray", "tokenizers", "numpy", "matplotlib", "jinja2", "PIL", "router", *NODES),
    "corun.gateway.app": (*ENGINE, "ray", "tokenizers", "router", *NODES, "corun.node"),
    "router.app": (*ENGINE, "ray", *NODES, "corun.node"),
    "corun.testing": (*ENGINE, "ray", "numpy"),
    # Settings are pinned before the engine's libraries are imported, so a node's own modules must not do it.
    "prefill_node.__main__": (*ENGINE, "ray", "tokenizers", "router", "decode_node"),
    "decode_node.__main__": (*ENGINE, "ray", "tokenizers", "router", "prefill_node"),
}


@pytest.mark.parametrize(("module", "forbidden"), LOADS.items(), ids=LOADS.keys())
def test_an_import_loads_no_more_than_it_says(module: str, forbidden: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print('\\n'.join(sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = child.stdout.split()
    assert module in loaded
    assert [name for name in loaded if is_of(name, forbidden)] == []


def test_the_reader_of_imports_reads_all_of_them() -> None:
    source = """
import torch.nn as nn
from . import wire
from ..router import text as t
from vllm.config import A, B
def f():
    import ray
    importlib.import_module("tokenizers")
if TYPE_CHECKING:
    from nixl import agent
"""
    found = "torch.nn corun.node.wire corun.router.text vllm.config.A vllm.config.B ray tokenizers nixl.agent"
    assert imports("corun/node/x.py", ast.parse(source)) == set(found.split())
    assert is_of("ray.util", ["ray"])
    assert not is_of("rays", ["ray"])
