"""`corun fingerprint`: show the contract of a cluster in one line or in full, or compare two contracts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from corun.cli.options import RouterOptions
from corun.contract import Contract, diff
from corun.errors import InvalidArgumentError, UnavailableError
from corun.records.rows import to_line
from corun.types import ClusterStatus, NodeRole, NodeState

Contracts = dict[NodeRole, Contract]


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Show the contract that the cluster's bits depend on.

    Equal fingerprints give equal bits. With --diff, the exit code is 3 if anything differs.

    examples:
      corun fingerprint
      corun fingerprint --explain
      corun fingerprint --json > monday.jsonl
      corun fingerprint --diff monday.jsonl cluster
      corun fingerprint --diff decode-0 decode-1
    """

    explain: bool = False
    """Show every field of the contract."""
    diff: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="A B")] = None
    """Show the fields in which two contracts differ, each a node id, "cluster", or a file made with --json."""
    json: bool = False
    """Print JSON objects instead: one a node, or, with --diff, one a field."""
    cluster: tyro.conf.OmitArgPrefixes[RouterOptions] = field(default_factory=RouterOptions)

    def run(self) -> int:
        if self.diff is not None:
            if len(self.diff) != 2:
                raise InvalidArgumentError("diff", self.diff, "must be two: files, nodes or 'cluster'")
            return self._diff(*self.diff)
        status = self._status()
        if self.json:
            for line in contract_lines(status):
                print(line)
            return 0
        print(status.fingerprint)
        if self.explain:
            _explain(of_cluster(status))
        return 0

    def _status(self) -> ClusterStatus:
        with self.cluster.client() as client:
            status = client.get_cluster()
        if not status.fingerprint:
            raise UnavailableError("no node has joined, so there is no contract yet")
        return status

    def _diff(self, first: str, second: str) -> int:
        differences = differing(self._read(first), self._read(second))
        if self.json:
            for name, values in differences.items():
                print(to_line({"field": name, "values": list(values)}))
        elif differences:
            table = Table("field", first, second, box=box.SIMPLE_HEAD, pad_edge=False)
            for name, values in sorted(differences.items()):
                table.add_row(name, *values)
            _console().print(table)
        else:
            print("no field differs")
        return 3 if differences else 0

    def _read(self, name: str) -> Contracts:
        """Return the contracts of a file, of the cluster, or of one of its nodes."""
        if Path(name).is_file():
            return of_file(Path(name))
        status = self._status()
        if name == "cluster":
            return of_cluster(status)
        for node in status.nodes:
            if node.node.ref.node_id == name:
                return _by_role([Contract.from_json(node.node.contract_json)])
        known = ", ".join(node.node.ref.node_id for node in status.nodes)
        raise InvalidArgumentError("diff", name, f"must be a file, 'cluster' or one of the nodes {known}")


def contract_lines(status: ClusterStatus) -> list[str]:
    """Return the contracts of a cluster's nodes as lines of JSON, which `of_file` reads. A contract that a router could
    not read has none."""
    lines = []
    for node in [node for node in status.nodes if node.node.contract_json]:
        ref = {"node_id": node.node.ref.node_id, "state": node.state.value, "fingerprint": status.fingerprint}
        lines.append(to_line(ref | {"contract": json.loads(node.node.contract_json)}))
    return lines


def contracts_beside(results: Path) -> Path:
    """Return the file of the contracts that a batch's results were drawn under."""
    return results.with_suffix(".contracts.jsonl")


def _by_role(found: Sequence[Contract]) -> Contracts:
    """Return the first contract of each role, in their order."""
    contracts: Contracts = {}
    for contract in found:
        contracts.setdefault(contract.role, contract)
    return contracts


def of_cluster(status: ClusterStatus) -> Contracts:
    """Return the contracts of the cluster. Those of refused nodes do not count."""
    nodes = [node.node for node in status.nodes if node.state is not NodeState.REFUSED]
    return _by_role([Contract.from_json(node.contract_json) for node in nodes])


def of_file(path: Path, fingerprint: str = "") -> Contracts:
    """Return the contracts that `corun fingerprint --json` printed. Those of refused nodes do not count, nor those of
    another fingerprint if one is given.

    Raises InvalidArgumentError if the file is not such output or holds no contract.
    """
    contracts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            values = json.loads(line.decode())
            state, contract = NodeState(values["state"]), Contract.from_json(json.dumps(values["contract"]))
        except (KeyError, TypeError, ValueError, RecursionError):
            limit = "must be the output of corun fingerprint --json"
            raise InvalidArgumentError(f"{path}:{number}", line.decode(errors="replace"), limit) from None
        if state is not NodeState.REFUSED and fingerprint in ("", values.get("fingerprint")):
            contracts.append(contract)
    if not contracts:
        raise InvalidArgumentError("diff", str(path), "must hold a contract: the output of corun fingerprint --json")
    return _by_role(contracts)


def differing(first: Contracts, second: Contracts) -> dict[str, tuple[str, str]]:
    """Return the fields that differ, with both values. Compare the roles that both sides have; if they have none in
    common, compare the model's fields, which every role has."""
    pairs = [(first[role], second[role]) for role in NodeRole if role in first and role in second]
    if pairs:
        return {name: values for a, b in pairs for name, values in diff(a, b).items()}
    differences = diff(next(iter(first.values())), next(iter(second.values())))
    return {name: values for name, values in differences.items() if name.startswith("model.")}


def _explain(contracts: Contracts) -> None:
    table = Table("field", "value", box=None, show_header=False, pad_edge=False)
    parts: dict[str, Any] = {"model": {}}
    for contract in contracts.values():
        parts |= json.loads(contract.canonical_json())
    del parts["role"]
    rows = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    for name, value in rows.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(name, text or "(none)")
    _console().print(table)


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160  # Two digests fit side by side; a file has no width.
    return console
