"""What a gateway refuses, and how: status, field, value and limit, from its own checks and from the router's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from corun.errors import (
    CancelledByPeerError,
    ContractMismatchError,
    CorunError,
    DataLossError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    StaleGenerationError,
    UnauthenticatedError,
    UnavailableError,
)
from corun.gateway.config import GatewayConfig
from corun.gateway.errors import STATUSES, body_of, response_of
from corun.testing.cluster import WAIT_S
from tests.clusters import cluster
from tests.gateway.serving import PROMPT, Http, serving
from tests.secrets import Secrets

REFUSED: dict[str, list[Any]] = {
    "temperature": [-1, 0.001, 2.5, True, "hot", 1e999],
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
    "logprobs": [2, -1, True, "1"],
    "stream": [1],
    "prompt": [None, "", [], [[]], [1, "a"], ["a", 1], [-1], [1.5], [True], {"a": 1}, ["a"] * 129, [256], "x" * 600],
    "model": [5],
    "request_id": [5, "x" * 129],
    "priority": ["best", 1.5, True],
    "return_token_ids": [1],
    "return_tokens_as_token_ids": [1, "yes"],
    "echo": [True, 0],
    "best_of": [2, True],
    "suffix": ["x"],
    "use_beam_search": [True],
    "length_penalty": [2],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "add_special_tokens": [False],
    "truncate_prompt_tokens": [5],
    "truncation_side": ["left"],
    "allowed_token_ids": [[1]],
    "bad_words": [["x"]],
    "prompt_logprobs": [0],
    "prompt_embeds": ["x"],
    "logprob_token_ids": [[1]],
    "response_format": [{"type": "json_object"}],
    "structured_outputs": [{"regex": "a"}],
    "return_token_offsets": [True],
    "kv_transfer_params": [{}],
    "cache_salt": ["x"],
    "vllm_xargs": [{}],
    "repetition_detection": [{}],
    "thinking_token_budget": [5],
    "tempreature": [0.5, None],
}


async def test_what_cannot_be_done_is_refused_by_name(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for field, values in REFUSED.items():
            for value in values:
                for stream in (False, True):
                    await _check_refused(http, field, {"prompt": list(PROMPT), "stream": stream, field: value})


async def _check_refused(http: Http, field: str, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).replace("Infinity", "1e999").encode()
    status, answer, headers = await http.post(body, headers={"Content-Type": "application/json"})
    error = answer["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error"), (fields, answer)
    assert error["param"].startswith(field), (fields, answer)
    assert error["message"] == f"{error['param']} = {error['value']}: {error['limit']}"
    assert error["limit"]
    assert headers["Content-Type"].startswith("application/json")


async def test_stream_options_are_checked(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for options, field in (
            ([], "stream_options"),
            ({"include_usage": 1}, "stream_options.include_usage"),
            ({"other": True}, "stream_options.other"),
        ):
            await _check_refused(http, field, {"prompt": "a", "stream": True, "stream_options": options})
        await _check_refused(http, "stream_options", {"prompt": "a", "stream_options": {"include_usage": True}})


async def test_one_bad_prompt_of_several_ends_all(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for stream in (False, True):
            fields = {"prompt": [[1, 2], [999]], "stream": stream, "max_tokens": 400}
            await _check_refused(http, "prompt[1].token_ids[0]", fields)
        await fake.idle()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "top_p": NaN}', b"[" * 5000],
)
async def test_a_body_that_is_no_request_is_refused(model: str, body: bytes) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        status, answer, _ = await http.post(body, headers={"Content-Type": "application/json"})
        assert (status, answer["error"]["param"]) == (400, "body")


async def test_what_http_refuses_is_json_too(model: str) -> None:
    async with cluster(model) as fake, serving(fake, max_body_bytes=1000) as http:
        json_type = {"Content-Type": "application/json"}
        found = {
            "size": await http.post(b'{"prompt": "' + b"a" * 2000 + b'"}', headers=json_type),
            "type": await http.post(b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}),
            "coding": await http.post(b"x", headers={**json_type, "Content-Encoding": "gzip"}),
            "path": await http.post({}, path="/v1/nothing"),
            "chat": await http.post({"messages": []}, path="/v1/chat/completions"),
            "method": await http.post({}, path="/v1/models"),
        }
        assert {name: status for name, (status, _, _) in found.items()} == {
            "size": 413,
            "type": 415,
            "coding": 415,
            "path": 404,
            "chat": 404,
            "method": 405,
        }
        for status, answer, _ in found.values():
            assert answer["error"]["code"] == status
        assert "/v1/completions" in found["chat"][1]["error"]["message"]
        assert found["method"][1]["error"]["message"] == "POST /v1/models: this path takes GET,HEAD"
        assert (await http.get("/v1/completions"))[0] == 405


@pytest.mark.parametrize("path", ["/v1/responses", "/tokenizer_info", "/", "/v1/" + "x" * 500])
async def test_an_unknown_path_says_what_there_is(model: str, path: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for status, answer in (await http.get(path), (await http.post({"input": "a"}, path=path))[:2]):
            error = answer["error"]
            assert (status, error["code"], error["type"]) == (404, 404, "not_found_error")
            assert path[:50] in error["message"]
            assert "but /health, /v1/completions, /v1/models, /v1/models/{name}, /version" in error["message"]
            assert len(error["message"]) < 300


async def test_overload_is_429_with_a_time_to_come_back(model: str) -> None:
    async with cluster(model, slots=1, max_queued_samples=1) as fake, serving(fake) as http:
        answers = await asyncio.gather(
            *(http.post({"prompt": "a", "max_tokens": 100, "stream": False}) for _ in range(8))
        )
    statuses = sorted(status for status, _, _ in answers)
    assert statuses[0] == 200
    assert statuses[-1] == 429
    refused = [(answer, headers) for status, answer, headers in answers if status == 429]
    for answer, headers in refused:
        assert answer["error"]["type"] == "rate_limit_error"
        assert int(headers["Retry-After"]) >= 1


async def test_a_gateway_has_room_for_so_many(model: str) -> None:
    async with cluster(model) as fake, serving(fake, max_requests=2) as http:
        status, answer, headers = await http.post({"prompt": ["a", "b", "c"]})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "2 prompts" in answer["error"]["message"]
        assert (await http.post({"prompt": ["a", "b"]}))[0] == 200


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
        for wrong in ({}, {"Authorization": "Bearer EMPTY"}, {"Authorization": "Bearer " + "x" * 20}):
            status, answer, headers = await http.post(body, headers=wrong)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert headers["WWW-Authenticate"] == "Bearer"
            assert (await http.get("/v1/models", headers=wrong))[0] == 401
        assert (await http.post(body, headers={"Authorization": "Basic abc"}))[0] == 401
        status, answer, _ = await http.post({**body, "priority": "high"}, headers=limited)
        assert (status, answer["error"]["param"]) == (403, "priority")
        both = await asyncio.gather(*(http.post({**body, "max_tokens": 50}, headers=limited) for _ in range(2)))
        assert sorted(status for status, _, _ in both) == [200, 429]
        assert (await http.get("/v1/models", headers=good))[0] == 200
        assert (await http.get("/health"))[0] == 200  # With its own token, which opens nothing else.


EMPTY_KEYS = ("", "Bearer", "Bearer ", "bearer  ", "Bearer EMPTY")
"""What tools send that were given no key."""


async def test_a_key_that_is_none_is_no_token(model: str, tmp_path: Path) -> None:
    secrets = Secrets.make(tmp_path)
    with_tokens = cluster(model, client=secrets.client, **secrets.settings)
    async with cluster(model) as fake, serving(fake) as http:
        for key in EMPTY_KEYS:
            status, answer, _ = await http.post({"prompt": "a"}, headers={"Authorization": key})
            assert status == 200, (key, answer)
    async with with_tokens as fake, serving(fake, tls_ca=secrets.path("ca.pem")) as http:
        for key in EMPTY_KEYS:
            status, answer, _ = await http.post({"prompt": "a"}, headers={"Authorization": key})
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert "needs a client's token" in answer["error"]["message"]


async def test_without_a_cluster_it_is_unavailable(model: str) -> None:
    async with cluster(model) as fake, serving(fake, router="127.0.0.1:1", connect_timeout_s=0.2) as http:
        status, answer, _ = await http.post({"prompt": "a"})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        assert (await http.get("/health"))[0] == 503
        assert (await http.get("/v1/models"))[0] == 503


async def test_a_cluster_without_nodes_is_not_well(model: str) -> None:
    async with cluster(model, decodes=0) as fake, serving(fake) as http:
        await fake.until(lambda: fake.state("p1") is not None)
        assert (await http.get("/health"))[0] == 503


async def test_a_deadline_is_504_before_the_first_token_and_an_event_after_it(model: str) -> None:
    async with cluster(model) as fake, serving(fake, timeout_s=1.0) as http:
        decode = next(node for node in fake.nodes if node.info.ref.node_id == "d1")
        async with http.session.post(
            http.gateway.url + "/v1/completions", json={"prompt": [1], "max_tokens": 500, "stream": True, "seed": 1}
        ) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            decode.engine.hanging = True
            text = await asyncio.wait_for(response.text(), WAIT_S)
        *_, error, done, rest = text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504
        assert (done, rest) == ("data: [DONE]", "")
        status, answer, _ = await http.post({"prompt": "a", "stream": True})
        assert (status, answer["error"]["type"]) == (504, "timeout_error")
        decode.engine.hanging = False


async def test_a_bug_is_told_by_an_id_only(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("an internal secret")

    async with cluster(model) as fake, serving(fake) as http:
        monkeypatch.setattr("corun.gateway.completions.completion", broken)
        status, answer, _ = await http.post({"prompt": "a"})
        monkeypatch.setattr("corun.gateway.responses.Events.usage", broken)
        events = await http.stream(max_tokens=1)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    error_id = answer["error"]["message"].rpartition(" ")[2]
    assert error_id in caplog.text
    assert events[-1]["error"]["code"] == 500
    assert "secret" not in json.dumps([answer, events])


def test_every_error_has_a_status() -> None:
    errors: list[CorunError] = [
        InvalidArgumentError("sampling_params.top_p", 2, "must be in (0, 1]"),
        UnauthenticatedError("x"),
        PermissionDeniedError("priority", "high", "must be low"),
        NotFoundError("x"),
        ContractMismatchError("x", {"a": ("1", "2")}),
        StaleGenerationError("n", "1", "2"),
        OverloadedError("x", 2.5),
        InternalError("x"),
        DataLossError("x"),
        CancelledByPeerError("x"),
        UnavailableError("x"),
        DeadlineError("x"),
    ]
    assert [response_of(error).status for error in errors] == [
        400,
        401,
        403,
        404,
        409,
        409,
        429,
        500,
        500,
        503,
        503,
        504,
    ]
    assert {error.code for error in errors} == set(STATUSES)
    assert set(STATUSES) <= set(grpc.StatusCode)
    assert body_of(errors[0])["error"]["message"] == "top_p = 2: must be in (0, 1]"
    assert response_of(errors[6]).headers["Retry-After"] == "3"
    assert "Retry-After" not in response_of(errors[10]).headers


def test_the_text_of_a_prompt_is_not_shown_whole() -> None:
    assert len(body_of(InvalidArgumentError("prompt", "x" * 10_000, "must be shorter"))["error"]["message"]) < 200


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
