"""Groups of samples, their table, and the file that an interrupted batch goes on from."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from corun import (
    AsyncClient,
    Client,
    ContractMismatchError,
    CorunError,
    DataLossError,
    Generations,
    InvalidArgumentError,
    SamplingParams,
    UnavailableError,
)
from corun.client.generations import KeptResults
from corun.params import sample_seed
from corun.records.verification import cases_from_row
from corun.testing import expected, local_cluster
from tests.corun.cli.conftest import read_rows, write_rows
from tests.corun.fake_router import FakeRouter

PARAMS = SamplingParams(max_tokens=6, logprobs=True)
PROMPTS: list[str | list[int]] = ["ü one", [1, 2, 3], "three"]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


async def test_a_group_is_prefilled_once_and_each_sample_has_its_seed() -> None:
    async with local_cluster() as cluster, AsyncClient(cluster.address) as client:
        done = await client.generate_many([[5, 6, 7], [8, 9]], PARAMS, n=8, seeds=[1, 2], progress=False)
        assert len(cluster.node("p1").engine.prefilled) == 2
    for generation, prompt, seed in zip(done, ([5, 6, 7], [8, 9]), (1, 2), strict=True):
        assert [sample.seed for sample in generation.samples] == [sample_seed(seed, i) for i in range(8)]
        for sample in generation.samples:
            token_ids, logprobs, _ = expected(prompt, PARAMS, sample.seed)
            assert (list(sample.token_ids), list(sample.logprobs)) == (token_ids, logprobs)


def test_columns_have_a_row_for_each_sample_with_fp32_bits(client: Client) -> None:
    done = client.generate_many(PROMPTS, PARAMS, n=2, seeds=[1, 2, 3])
    columns = done.columns()
    assert {len(column) for column in columns.values()} == {6}
    assert (columns["prompt_index"], columns["sample_index"]) == ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    samples = [sample for generation in done for sample in generation.samples]
    for sample, logprobs, token_ids in zip(samples, columns["logprobs"], columns["token_ids"], strict=True):
        assert (logprobs.typecode, logprobs.itemsize, token_ids.typecode, token_ids.itemsize) == ("f", 4, "I", 4)
        assert logprobs.tobytes() == struct.pack(f"{len(logprobs)}f", *sample.logprobs)
        assert token_ids.tolist() == list(sample.token_ids)
    assert Generations([]).columns()["logprobs"] == []


def test_tables_keep_every_bit(client: Client) -> None:
    pandas, arrow = import_module("pandas"), import_module("pyarrow")
    done = client.generate_many(PROMPTS, PARAMS, n=2, seeds=[1, 2, 2**63 - 1])
    columns, frame, table = done.columns(), done.to_pandas(), done.to_arrow()
    assert (list(frame.columns), table.column_names) == (list(columns), list(columns))
    assert {str(each.dtype) for each in frame.logprobs} == {"float32"}
    assert table.schema.field("logprobs").type == arrow.list_(arrow.float32())
    bits = [each.tobytes() for each in columns["logprobs"]]
    assert [each.tobytes() for each in frame.logprobs] == bits
    assert [array("f", each).tobytes() for each in table["logprobs"].to_pylist()] == bits
    for name in ("seed", "text", "output_digest"):
        assert frame[name].tolist() == table[name].to_pylist() == columns[name]
    assert isinstance(Generations([]).to_pandas(), pandas.DataFrame)
    assert Generations([]).to_arrow().num_rows == 0


@pytest.mark.parametrize(("method", "package"), [("to_pandas", "pandas"), ("to_arrow", "pyarrow")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, method: str, package: str) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("corun.client.generations.importlib.import_module", missing)
    with pytest.raises(CorunError, match=rf"{method} needs package {package}.*pip install '\.\[tables\]'"):
        getattr(Generations([]), method)()


def test_an_interrupted_batch_goes_on(client: Client, fake: FakeRouter, output: Path) -> None:
    def run() -> Generations:
        return client.generate_many(PROMPTS, PARAMS, n=2, seeds=[1, None, 3], results=output, concurrency=1)

    fake.refused_prompts["three"] = UnavailableError("gone")
    with pytest.raises(UnavailableError):
        run()
    assert len(read_rows(output)) == 2
    with output.open("a") as file:
        file.write('{"id": "2", "prom')  # As a power cut leaves it.
    del fake.refused_prompts["three"]
    fake.requests.clear()
    done = run()
    assert [request.text for request in fake.requests] == ["three"]
    fake.requests.clear()
    assert run() == done, "what comes out of a file is what went into it, bit by bit"
    assert not fake.requests
    whole = client.generate_many(PROMPTS, PARAMS, n=2, seeds=[1, 77, 3])
    assert [[s.logprobs for s in each.samples] for each in done] == [
        [s.logprobs for s in each.samples] for each in whole
    ]
    rows = {row["id"]: row for row in read_rows(output)}
    assert [len(cases_from_row("here", rows[str(index)])) for index in range(3)] == [2, 2, 2], "corun verify reads it"


Row = dict[str, Any]


def _of_other_weights(row: Row) -> None:
    row["receipt"]["fingerprint"] = "e" * 64


def _changed(row: Row) -> None:
    row["logprobs"][0] -= 1


def _another_prompt(row: Row) -> None:
    row["prompt"] = "other"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_of_other_weights, ContractMismatchError, "the file has results of another contract"),
        (_changed, DataLossError, None),
        (_another_prompt, InvalidArgumentError, None),
    ],
)
def test_a_file_that_does_not_belong_to_the_batch_is_refused(
    client: Client, output: Path, change: Callable[[Row], None], error: type[CorunError], says: str | None
) -> None:
    client.generate_many(PROMPTS[:2], PARAMS, seeds=[1, 2], results=output)
    rows = sorted(read_rows(output), key=lambda row: row["id"])
    change(rows[0])
    before = write_rows(output, *rows).read_bytes()
    with pytest.raises(error, match=says):
        client.generate_many(PROMPTS, PARAMS, seeds=[1, 2, 3], results=output)
    assert output.read_bytes() == before


def test_a_shorter_batch_does_not_mix_two_policies_either(client: Client, output: Path) -> None:
    """The rows that are of another contract are none of the second call's."""
    client.generate_many(PROMPTS[:2], PARAMS, seeds=[1, 2], results=output)
    rows = sorted(read_rows(output), key=lambda row: row["id"])
    _of_other_weights(rows[1])
    before = write_rows(output, rows[1]).read_bytes()
    with pytest.raises(ContractMismatchError, match="the file has results of another contract"):
        client.generate_many(PROMPTS[:1], PARAMS, seeds=[1], results=output)
    assert output.read_bytes() == before


async def test_a_file_of_results_is_not_read_in_the_event_loop(
    fake: FakeRouter, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def read(*args: Any) -> KeptResults:
        threads.append(threading.current_thread())
        return KeptResults(*args)

    monkeypatch.setattr("corun.client.client.KeptResults", read)
    async with AsyncClient(fake.address) as client:
        await client.generate_many(PROMPTS, PARAMS, results=output)
    assert threads != [threading.current_thread()]
    assert len(threads) == 1


@pytest.mark.parametrize("n", [0, 257, "2"])
def test_a_bad_number_of_samples_is_named(client: Client, fake: FakeRouter, n: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate_many(["a"], n=n)
    assert caught.value.field == "prompts[0].sampling_params.n"
    assert not fake.requests
