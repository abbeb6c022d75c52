"""Token files, and who may call what."""

from __future__ import annotations

from pathlib import Path

import pytest

from corun.errors import InvalidArgumentError, OverloadedError, UnauthenticatedError
from corun.rpc import auth
from corun.rpc.auth import Caller, ClientToken, Gate, bearer, read_client_tokens, read_token
from corun.types import Priority

CLUSTER, ALICE, BOB = "cluster-" + "c" * 24, "alice-" + "a" * 24, "bob-" + "b" * 24
HEALTH = "/grpc.health.v1.Health/Check"
GENERATE = "/corun.v1.ClusterService/Generate"
INTERNAL = (
    "/corun.v1.RegistryService/Register",
    "/corun.v1.DecodeService/Release",
    "/corun.v1.DecodeService/StreamSteps",
    "/corun.v1.PrefillService/Prefill",
    "/corun.v1.SomethingNew/Call",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def tokens(path: Path, text: str) -> tuple[ClientToken, ...]:
    path.write_text(text)
    return read_client_tokens("client_tokens_file", str(path))


@pytest.fixture
def gate(path: Path) -> Gate:
    return Gate(cluster=CLUSTER, clients=tokens(path, f"# ours\nalice: {ALICE} max_requests=2\n\n{BOB}\n"))


def test_only_the_cluster_token_opens_what_is_internal(gate: Gate) -> None:
    for method in INTERNAL:
        for given in ((), bearer(ALICE), bearer(BOB), bearer(CLUSTER[:-1]), bearer(CLUSTER + "x")):
            with pytest.raises(UnauthenticatedError, match="needs the cluster's token") as caught:
                gate.admit(method, given)
            assert not any(secret in str(caught.value) for secret in (CLUSTER, ALICE, BOB))
        gate.admit(method, bearer(CLUSTER))


def test_any_token_opens_what_is_public_and_none_what_is_open(gate: Gate) -> None:
    for token in (ALICE, BOB, CLUSTER):
        gate.admit(GENERATE, (("user-agent", "x"), *bearer(token)))
    for given in ((), bearer("wrong" * 4), bearer(ALICE) * 2, (("authorization", ALICE),), (("authorization", b"x"),)):
        with pytest.raises(UnauthenticatedError, match="needs a client's token"):
            gate.admit(GENERATE, given)
    gate.admit(HEALTH, ())
    with pytest.raises(UnauthenticatedError):
        gate.admit("/grpc.health.v1.HealthX/Check", ())


def test_without_tokens_all_is_open() -> None:
    for method in (GENERATE, *INTERNAL):
        Gate().admit(method, ())
    with pytest.raises(UnauthenticatedError):
        Gate(cluster=CLUSTER).admit(INTERNAL[0], ())
    Gate(cluster=CLUSTER).admit(GENERATE, ())


def test_every_token_is_compared_whole(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many comparisons, of equal lengths, whichever token is given."""
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    for token in (CLUSTER, ALICE, BOB, "w" * 500):
        compared.clear()
        try:
            gate.admit(GENERATE, bearer(token))
        except UnauthenticatedError:
            assert token[0] == "w"
        assert compared == [(32, 32)] * 3


def test_an_unnamed_token_keeps_its_name_wherever_it_stands(path: Path) -> None:
    """Its requests in progress, its share and its KV go by it: none of them may pass to another token."""
    (before,) = (token.caller for token in tokens(path, f"{BOB}\n"))
    other, after = (token.caller for token in tokens(path, f"# New.\n{ALICE}\n{BOB} max_requests=1\n"))
    assert after.name == before.name
    assert other.name != before.name
    assert before.name.startswith("token-")
    assert BOB not in before.name
    assert BOB[:8] not in before.name


def test_requests_in_progress_stay_with_their_token_when_the_file_is_edited(path: Path) -> None:
    found = [tokens(path, f"{ALICE} max_requests=1\n")]
    gate = Gate(cluster=CLUSTER, clients=lambda: found[0])
    with gate.admit(GENERATE, bearer(ALICE)):
        found[0] = tokens(path, f"{BOB} max_requests=1\n{ALICE} max_requests=1\n")
        with gate.admit(GENERATE, bearer(BOB)):
            pass
        with pytest.raises(OverloadedError), gate.admit(GENERATE, bearer(ALICE)):
            pass
    assert gate._running == {}


def test_a_token_says_who_calls_and_what_that_client_may(path: Path) -> None:
    found = tokens(path, f"alice: {ALICE} weight=3 max_priority=low operator\n{BOB} max_requests=1\n")
    assert ALICE not in repr(found)
    gate = Gate(cluster=CLUSTER, clients=found)
    called = {}
    for token in (ALICE, BOB, CLUSTER):
        with gate.admit(GENERATE, bearer(token)) as called[token]:
            pass
    assert called[ALICE] == Caller(name="alice", weight=3, max_priority=Priority.LOW, is_operator=True)
    assert called[BOB] == Caller(name=called[BOB].name, max_requests=1)
    assert called[CLUSTER] == Caller(name="cluster", is_operator=True)
    with Gate().admit(GENERATE, bearer(ALICE)) as nobody:
        assert nobody is None  # A token that nobody checked says nothing.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one token"),
        ("short\n", "a token of 5 characters"),
        (f"a: {ALICE} {BOB}\n", "line 1"),
        (f"a: {ALICE} max_requests=many\n", "line 1"),
        (f"a: {ALICE} max_requests=1 max_requests=2\n", "line 1"),
        (f"a: {ALICE} max_priority=urgent\n", "line 1"),
        (f"a: {ALICE} weight=0\n", "line 1"),
        (f"a: {ALICE} weight=1e3\n", "line 1"),
        (f"a: {ALICE} name=b\n", "line 1"),
        (f"a: {ALICE} operator=no\n", "line 1"),
        (f"a: {ALICE} operator operator\n", "line 1"),
        (f"{ALICE}\n{ALICE}\n", "two equal tokens"),
        (f"a: {ALICE}\na: {BOB}\n", "two equal names"),
        (f"a: {ALICE}\nb: {ALICE}\n", "two equal tokens"),
        (f"{ALICE}:{BOB}\n", "line 1"),  # It may be one token with a colon, which would be shown as a name.
        (f"a:{BOB} max_requests=1\n", "line 1"),
        ("a:\n", "line 1"),
    ],
)
def test_bad_files_are_refused_without_their_secrets(text: str, words: str, path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        tokens(path, text)
    assert caught.value.field == "client_tokens_file"
    assert ALICE not in str(caught.value)


def test_a_file_of_one_token(path: Path) -> None:
    path.write_text(f"\n{CLUSTER}\n")
    assert read_token("f", str(path)) == CLUSTER
    for content, words in ((b"", "one token"), (b"a\nb\n", "not 2"), (b"\xff" * 20, "ASCII"), (b"x y" * 9, "visible")):
        path.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=words):
            read_token("f", str(path))
    with pytest.raises(InvalidArgumentError, match="readable file"):
        read_token("f", str(path / "none"))
