"""What a gateway refuses, and how: status, field, value and limit, from its own checks and from the router's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from corun.errors import CorunError, InvalidArgumentError, OverloadedError, Shown, UnavailableError
from corun.gateway.config import GatewayConfig
from corun.gateway.errors import STATUSES, body_of
from corun.gateway.failures import response_of
from corun.gateway.requests import _FIXED_OF_COMPLETIONS as FIXED_FIELDS
from corun.gateway.requests import read_request
from corun.testing.cluster import WAIT_S
from tests.answers import put_forward
from tests.clusters import cluster, short_calls
from tests.gateway.serving import PROMPT, serving, with_tokens
from tests.secrets import Secrets

REFUSED: dict[str, list[Any]] = {
    "temperature": [-1, 0.001, 2.5, True, "hot"],
    "top_p": [0, 1.5],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "max_tokens": [0, "many", 10**30],
    "min_tokens": [17],
    "n": [0, 1000, True],
    "seed": [-1, 2**63, 1.5, "1"],
    "stop": [5, [""], ["x"] * 17],
    "stop_token_ids": [[-1], "a", [256]],
    "ignore_eos": [1],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, 1e-40],
    "logit_bias": [[1], {"a": 1}, {"1": 101}, {"01": 1, "1": 1}, {"300": 1}],
    "logprobs": [21, -1, True, "1"],
    "stream": [1],
    "prompt": [None, "", [], [[]], [1, "a"], ["a", 1], [-1], [1.5], [True], {"a": 1}, ["a"] * 129, [256], "x" * 600],
    "model": [5],
    "request_id": [5, "x" * 129],
    "priority": ["best", 1.5, True],
    "return_token_ids": [1],
    "return_tokens_as_token_ids": [1, "yes"],
    "echo": [0],
    "add_special_tokens": [0],
    "best_of": [True],
    "tempreature": [0.5, None],
    **{name: [["something else"]] for name in FIXED_FIELDS if name != "best_of"},
}


async def test_what_cannot_be_done_is_refused_by_name(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for field, values in REFUSED.items():
            for value in values:
                for stream in (False, True):
                    named = await http.refused({"prompt": list(PROMPT), "stream": stream, field: value})
                    assert named.startswith(field), (field, value)


MALFORMED = (
    b"not http\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
)


@pytest.mark.parametrize("sent", MALFORMED)
async def test_what_is_no_http_leaves_no_traceback_in_the_log(
    model: str, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """Anybody may send it, as often as he likes."""
    async with cluster(model) as fake, serving(fake) as http:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.gateway.port)
            writer.write(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"}")
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), WAIT_S)
            assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
            writer.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_parts_of_a_request_are_refused_by_name(model: str) -> None:
    """Options of streams, and one bad prompt of several, which ends all."""
    async with cluster(model) as fake, serving(fake) as http:
        for options, field in (
            ([], "stream_options"),
            ({"include_usage": 1}, "stream_options.include_usage"),
            ({"other": True}, "stream_options.other"),
        ):
            assert await http.refused({"prompt": "a", "stream": True, "stream_options": options}) == field
        assert await http.refused({"prompt": "a", "stream_options": {"include_usage": True}}) == "stream_options"
        for stream in (False, True):
            fields = {"prompt": [[1, 2], [999]], "stream": stream, "max_tokens": 400}
            assert await http.refused(fields) == "prompt[1][0]"
            assert await http.refused({"prompt": ["a", ""], "stream": stream}) == "prompt[1]"
            for prompt, field in (
                ("", "prompt"),
                ("x" * 600, "prompt"),
                ([1, 256], "prompt[1]"),
                ([[1, 256]], "prompt[0][1]"),
            ):
                assert await http.refused({"prompt": prompt, "stream": stream}) == field
                if not stream:
                    scored = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
                    assert await http.refused(scored) == field
        await fake.idle()


def test_an_id_has_room_for_the_numbers_of_prompts() -> None:
    """Each prompt is a request of the cluster, with an id of its own. What has no room for it is refused at once, and
    not after other prompts were tokenized."""
    for count, room in ((1, 128), (2, 126), (10, 126), (11, 125), (101, 124)):
        body = json.dumps({"prompt": ["a"] * count}).encode()
        assert read_request(body, request_id="x" * room, max_prompts=128).id_of(count - 1)
        for wrong in ({"request_id": "x" * (room + 1)}, {"body": "x" * (room + 1)}):
            asked = {"prompt": ["a"] * count, "request_id": wrong.get("body")}
            with pytest.raises(InvalidArgumentError, match=f"request_id = .* at most {room} characters"):
                read_request(json.dumps(asked).encode(), request_id=wrong.get("request_id"), max_prompts=128)


def test_a_prompt_must_be_given() -> None:
    with pytest.raises(InvalidArgumentError, match="prompt = None: must be given as text"):
        read_request(b"{}", max_prompts=1)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"prompt": "a", "max_token": 1}', "max_token = 1: is not a known field; the nearest is max_tokens"),
        (b'{"prompt": "a", "%s": 1}' % (b"x" * 10**6), "x = 1: is not a known field"),
        (b'{"prompt": "a", "metadata": {"b": 1, "a": 1, "a": 2}}', 'the name "a" is in an object twice'),
    ],
)
def test_names_of_fields_are_helped_with(body: bytes, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{why}$"):
        read_request(body, max_prompts=1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "top_p": NaN}',
        b"[" * 5000,
        b'{"prompt": "a", "metadata": {"a": 1e999}}',
        b'{"prompt": "a", "metadata": %s%s}' % (b"[" * 100, b"]" * 100),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^body = "):
        read_request(body, max_prompts=1)


async def test_what_http_refuses_is_json_too(model: str) -> None:
    json_type, long = {"Content-Type": "application/json"}, "/v1/" + "x" * 500
    async with cluster(model) as fake, serving(fake, max_body_bytes=1000) as http:
        for status, (found, answer, _) in (
            (413, await http.post(b'{"prompt": "' + b"a" * 2000 + b'"}', headers=json_type)),
            (415, await http.post(b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})),
            (415, await http.post(b"x", headers={**json_type, "Content-Encoding": "gzip"})),
            (405, await http.post({}, path="/v1/models")),
        ):
            assert (found, answer["error"]["code"]) == (status, status)
        assert answer["error"]["message"] == "POST /v1/models: this path takes GET,HEAD"
        assert (await http.get("/v1/completions"))[0] == 405
        for path in ("/v1/embeddings", "/v1/chat", "/index.html", long):
            for status, answer in (await http.get(path), (await http.post({"input": "a"}, path=path))[:2]):
                error = answer["error"]
                assert (status, error["code"], error["type"]) == (404, 404, "not_found_error")
                assert path[:50] in error["message"]
                assert "but /, /detokenize, /health, /live, " in error["message"]
                assert len(error["message"]) < 400


async def test_overload_is_429_with_a_time_to_come_back(model: str) -> None:
    """The router refuses some of them, and the gateway itself the others."""
    async with cluster(model, slots=1, max_queued_samples=1) as fake, serving(fake, max_requests=8) as http:
        answers = await asyncio.gather(*(http.post({"prompt": "a", "max_tokens": 100}) for _ in range(8)))
        status, answer, headers = await http.post({"prompt": ["a"] * 9})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "8 prompts" in answer["error"]["message"]
    refused = [(answer["error"]["type"], headers) for status, answer, headers in answers if status != 200]
    assert 0 < len(refused) < 8
    for kind, headers in refused:
        assert (kind, int(headers["Retry-After"]) >= 1) == ("rate_limit_error", True)


async def test_tokens_are_the_routers_business(model: str, tmp_path: Path) -> None:
    secrets = Secrets.make(tmp_path)
    token = "limited-client-token"
    lines = f"limited: {token} max_requests=1 max_priority=normal\n"
    (tmp_path / "clients.tokens").write_text((tmp_path / "clients.tokens").read_text() + lines)
    own = {"tls_ca": secrets.path("ca.pem"), "token_file": secrets.path("client.token")}
    async with cluster(model, client=secrets.client, **secrets.settings) as fake, serving(fake, **own) as http:
        good = {"Authorization": f"Bearer {secrets.token('client')}"}
        limited = {"Authorization": f"bearer {token}"}
        body = {"prompt": "a", "max_tokens": 2}
        assert (await http.post(body, headers=good))[0] == 200
        assert (await http.post(body, headers=limited))[0] == 200
        unknown, none = "the token is not one of this cluster's", "send a header 'Authorization: Bearer TOKEN'"
        for key, why in (
            (None, none),
            ("Bearer ", none),
            ("Basic abc", none),
            ("Bearer EMPTY", unknown),
            ("Bearer " + "x" * 20, unknown),
        ):
            wrong = {} if key is None else {"Authorization": key}
            status, answer, headers = await http.post(body, headers=wrong)
            assert (status, answer["error"]["type"], answer["error"]["message"]) == (401, "authentication_error", why)
            assert headers["WWW-Authenticate"] == "Bearer"
            assert (await http.get("/v1/models", headers=wrong))[0] == 401
        status, answer, _ = await http.post({**body, "priority": "high"}, headers=limited)
        assert (status, answer["error"]["param"]) == (403, "priority")
        both = await asyncio.gather(*(http.post({**body, "max_tokens": 50}, headers=limited) for _ in range(2)))
        assert sorted(status for status, _, _ in both) == [200, 429]
        assert (await http.get("/v1/models", headers=good))[0] == 200
        assert (await http.get("/health"))[0] == 200  # With its own token, which opens nothing else.


async def test_a_key_that_is_none_is_no_token(model: str, tmp_path: Path) -> None:
    """Tools that were given no key send one of these."""
    async with cluster(model) as fake, serving(fake) as http, with_tokens(model, tmp_path) as (_, closed, _):
        for key in ("", "Bearer", "Bearer ", "bearer  ", "Bearer EMPTY"):
            for gateway, wanted in ((http, 200), (closed, 401)):
                status, answer, _ = await gateway.post({"prompt": "a"}, headers={"Authorization": key})
                assert status == wanted, (key, answer)
        assert answer["error"]["message"] == "the token is not one of this cluster's"


async def test_without_a_cluster_it_is_unavailable(model: str) -> None:
    async with cluster(model, decodes=0) as fake, serving(fake, router="127.0.0.1:1", connect_timeout_s=0.2) as http:
        status, answer, _ = await http.post({"prompt": "a"})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        assert (await http.get("/health"))[0] == (await http.get("/v1/models"))[0] == 503
        async with serving(fake) as without_nodes:
            assert (await without_nodes.get("/health"))[0] == 503


async def test_a_deadline_is_504_before_the_first_token_and_an_event_after_it(model: str) -> None:
    async with cluster(model) as fake, serving(fake, timeout_s=WAIT_S) as http:
        decode = next(node for node in fake.nodes if node.info.ref.node_id == "d1")
        async with http.session.post(
            http.gateway.url + "/v1/completions", json={"prompt": [1], "max_tokens": 500, "stream": True, "seed": 1}
        ) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            decode.engine.hanging = True
            put_forward(WAIT_S)
            text = await asyncio.wait_for(response.text(), WAIT_S)
        *_, error, done, rest = text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504
        assert (done, rest) == ("data: [DONE]", "")
        with short_calls():
            status, answer, _ = await http.post({"prompt": "a", "stream": True})
        assert (status, answer["error"]["type"]) == (504, "timeout_error")
        decode.engine.hanging = False


async def test_a_bug_is_told_by_an_id_only(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("an internal secret")

    async with cluster(model) as fake, serving(fake) as http:
        monkeypatch.setattr("corun.gateway.responses.whole", broken)
        status, answer, _ = await http.post({"prompt": "a"})
        monkeypatch.setattr("corun.gateway.responses.Events.usage", broken)
        events = await http.stream(max_tokens=1)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    error_id = answer["error"]["message"].rpartition(" ")[2]
    assert error_id in caplog.text
    assert events[-1]["error"]["code"] == 500
    assert "secret" not in json.dumps([answer, events])


def test_every_error_has_a_status() -> None:
    kinds = [CorunError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert set(STATUSES) == {kind.code for kind in kinds} <= set(grpc.StatusCode)
    refused = body_of(InvalidArgumentError("sampling_params.top_p", 2, "must be in (0, 1]"))
    assert refused["error"]["message"] == "top_p = 2: must be in (0, 1]"
    assert response_of(OverloadedError("x", 2.5)).headers["Retry-After"] == "3"
    assert "Retry-After" not in response_of(UnavailableError("x")).headers


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), ((), "[]"), (True, "true"), ({"a": ["b"]}, '{"a": ["b"]}'), ("ä", '"ä"'), (Shown("1 B"), "1 B")],
)
def test_values_are_shown_as_json(value: Any, text: str) -> None:
    error = body_of(InvalidArgumentError("stop", value, "must be another"))["error"]
    assert (error["value"], error["message"]) == (text, f"stop = {text}: must be another")


def test_the_text_of_a_prompt_is_not_shown_whole() -> None:
    assert body_of(InvalidArgumentError("prompt", [7] * 10**7, "must be shorter"))["error"]["value"].endswith(" 7,…")
    assert len(body_of(InvalidArgumentError("prompt", "x" * 10_000, "must be shorter"))["error"]["message"]) < 200
    # A client may name a field as it likes, and a template may say what it likes of a chat.
    assert len(json.dumps(body_of(InvalidArgumentError("x" * 10_000, 1, "z" * 10_000)))) < 3000


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("host", {"host": "0.0.0.0"}),
        ("host", {"host": ""}),
        ("port", {"port": 70000}),
        ("port", {"port": True}),
        ("max_requests", {"max_requests": 0}),
        ("max_body_bytes", {"max_body_bytes": 0}),
        ("timeout_s", {"timeout_s": 0}),
        ("client_timeout_s", {"client_timeout_s": float("inf")}),
        ("address", {"router": ""}),
        ("https_key", {"https_cert": "x"}),
        ("https_cert", {"https_cert": "/nowhere", "https_key": "/nowhere"}),
        ("tls_ca", {"tls_ca": "/nowhere"}),
        ("token_file", {"token_file": "/nowhere"}),
    ],
)
def test_a_configuration_is_checked(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        GatewayConfig(**values).check_files()
    assert raised.value.field == field


def test_a_public_address_wants_tls(tmp_path: Path) -> None:
    secrets = Secrets.make(tmp_path)
    files = {"https_cert": secrets.path("member.pem"), "https_key": secrets.path("member.key")}
    assert GatewayConfig(host="0.0.0.0", **files).https is not None
    assert GatewayConfig(host="0.0.0.0", insecure=True).https is None
