"""Cheap requests that could hurt somebody else's stream: prompts, parameters and bodies, each drawn from its number.

Owns what an attacker sends to a router and a gateway, and how it goes away. An assault returns how it was answered;
what must not happen to others is judged elsewhere. Tests only.
"""

from __future__ import annotations

import asyncio
import io
import json
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import grpc
import grpc.aio

from corun.rpc.channel import Access, Channel, channel
from corun.v1 import cluster_service_pb2 as pb
from tests.fuzz.http2 import varint
from tests.fuzz.messages import Maker

CALL_S = 20.0
"""Deadline of one assault."""
_MATERIAL = (
    "\u9fa5", "\U0001f600", " ", "\n", "a", "e\u0301\u0327", "\u200d", "<|endoftext|>", "1234567890", "\0", "\u202e",
    "\ufdfa", "lorem ipsum dolor ", "'s", "\ufeff", "\uff41", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
)  # fmt: skip
_SIZES = (1_000, 20_000, 200_000, 1_000_000, 6_000_000, 15_000_000)
"""UTF-8 bytes of a text."""
_PRIORITIES = (pb.PRIORITY_UNSPECIFIED, pb.PRIORITY_HIGH, pb.PRIORITY_NORMAL, pb.PRIORITY_LOW)
_CONDITIONS = (pb.CONDITION_ALONE, pb.CONDITION_CROWDED, pb.CONDITION_OTHER_SLOTS, pb.CONDITION_SHUFFLED)
_CORNERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 0.01, 0.009, 1e-40, 2.0, 2.001, 2.5, 1e30, float("nan"), float("inf"), -0.0),
    "top_p": (1e-300, 1e-6, 1.0, 0.0, 1.0000001),
    "top_k": (0, 1, 511, 512, 513, 2**31 - 1, -1),
    "min_p": (0.0, 1.0, 1e-300, 0.999999),
    "presence_penalty": (-2.0, 2.0, 2.1),
    "frequency_penalty": (-2.0, 2.0, float("nan")),
    "repetition_penalty": (1e-40, 1e-38, 1e-4, 0.01, 2.0, 0.0, 5e-324),
    "min_tokens": (0, 1, 16, 17, 2**32 - 1),
    "max_tokens": (1, 2, 16, 64),
    "n": (1, 2, 16, 256, 257, 0),
}


@dataclass(frozen=True, kw_only=True)
class Victim:
    """What is attacked, a router and a gateway, by a client whose token they know."""

    link: Channel
    session: aiohttp.ClientSession
    url: str
    """The gateway's."""
    token: str
    vocab_size: int
    max_model_len: int

    async def call(self, request: Any, *, method: str = "Generate", take: int = 10_000, after_s: float = 0.0) -> str:
        """The status of a call that reads `take` messages and, with `after_s`, waits so long before it reads."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        call = self.link.unary_stream(f"/corun.v1.ClusterService/{method}")(data, timeout=CALL_S)
        try:
            await asyncio.sleep(after_s)
            async for _ in call:
                take -= 1
                if take <= 0:
                    break
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        finally:
            call.cancel()
        return "OK"

    async def post(
        self, body: bytes | AsyncIterator[bytes], *, key: str | None = None, path: str = "/v1/completions"
    ) -> str:
        """The status of a request to the gateway; key: what to show instead of the right token."""
        shown = f"Bearer {self.token}" if key is None else key
        headers = {"Content-Type": "application/json"} | ({"Authorization": shown} if shown else {})
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        try:
            async with self.session.post(f"{self.url}{path}", data=data, headers=headers, timeout=timeout) as response:
                await response.read()
                return f"HTTP {response.status}"
        except asyncio.TimeoutError:
            return "HTTP timeout"
        except aiohttp.ClientError as error:
            return f"HTTP {type(error).__name__}"

    def request(self, rng: Random, length: int, **params: Any) -> pb.GenerateRequest:
        """A request with so many token ids."""
        request = pb.GenerateRequest(seed=rng.getrandbits(62), sampling_params=params)
        request.token_ids.ids.extend(rng.randrange(self.vocab_size) for _ in range(length))
        return request


@asynccontextmanager
async def victim(router: str, url: str, token: str = "", **sizes: int) -> AsyncIterator[Victim]:
    """Connections to what is attacked; sizes: `vocab_size` and `max_model_len` of its model."""
    access = Access(token=token)
    async with channel(router, access=access, max_message_bytes=2**26) as link, aiohttp.ClientSession() as session:
        yield Victim(link=link, session=session, url=url, token=token, **sizes)


async def ordinary(victim: Victim, rng: Random) -> str:
    """No assault: a request as anybody may have, with a prompt of any length that fits, read to its end."""
    length = int((victim.max_model_len - 64) ** rng.random())
    return await victim.call(victim.request(rng, length, max_tokens=64, n=rng.choice((1, 1, 2, 4))))


async def big_text(victim: Victim, rng: Random) -> str:
    """A text of up to 15 MB: one character, or words that no tokenizer has seen."""
    size, material = rng.choice(_SIZES), rng.choice(_MATERIAL)
    if rng.random() < 0.3:
        material = " ".join("".join(rng.choices(string.printable, k=rng.randrange(1, 40))) for _ in range(500))
    text = material * max(1, size // len(material.encode()))
    return await victim.call(pb.GenerateRequest(text=text, sampling_params={"max_tokens": 4}))


async def fitting_text(victim: Victim, rng: Random) -> str:
    """A text around the model's length, where no bound on bytes can refuse it."""
    text = rng.choice(_MATERIAL) * rng.randrange(1, 2 * victim.max_model_len)
    return await victim.call(pb.GenerateRequest(text=text, sampling_params={"max_tokens": 2}))


async def big_ids(victim: Victim, rng: Random) -> str:
    """Millions of token ids, or as many as fit, some of which are none."""
    count = rng.choice((0, victim.max_model_len - 2, victim.max_model_len + 1, 300_000, 4_000_000, 15_000_000))
    ids = bytes([rng.randrange(1, 127)]) * count if rng.random() < 0.8 else b"\xff\xff\xff\xff\x0f" * (count // 5)
    return await victim.call(_field(3, _field(1, ids)) + _field(4, b"\x28\x02"))


async def wide(victim: Victim, rng: Random) -> str:
    """A short prompt with a very long list, or a very long word, of something else."""
    count = rng.choice((1_000, 100_000, 400_000))
    if rng.random() < 0.2:
        return await victim.call(_field(1, b"") * 10 * count, method="Verify")
    entry = b"\x08\x01\x15\x00\x00\x80\x3f"  # Token 1 with a bias of 1.
    lists = (_field(7, b"x") * count, _field(8, b"\x03" * count), _field(13, entry) * count)
    words = (_field(6, b"\x08\x00") * count, _field(1, b"x" * 10 * count), _field(7, b"x" * 10 * count))
    params = rng.choice((b"", *lists))
    wide = rng.choice(words) if not params else b""
    return await victim.call(_field(2, b"a") + _field(4, params + b"\x28\x02") + wide)


async def corner(victim: Victim, rng: Random) -> str:
    """Parameters at their limits and beyond, several at a time, on tokens of the prompt."""
    request = victim.request(rng, rng.choice((1, 3, 16, 17)), max_tokens=8, logprobs=True)
    params = request.sampling_params
    for name in rng.sample(list(_CORNERS), rng.randrange(1, 5)):
        setattr(params, name, rng.choice(_CORNERS[name]))
    if rng.random() < 0.5:
        params.logit_bias.update({token: rng.choice((-100.0, 100.0, 1e-45)) for token in request.token_ids.ids})
    if rng.random() < 0.2:
        params.logit_bias.update(dict.fromkeys(range(min(1024, victim.vocab_size)), -100.0))
    return await victim.call(request)


async def changed(victim: Victim, rng: Random) -> str:
    """A right request with one to three fields, at any depth, set to something else."""
    request = pb.GenerateRequest(seed=1, token_ids={"ids": (1, 2, 3)}, sampling_params={"max_tokens": 8})
    made = Maker(rng).changed(request)
    made.ClearField("stream_id")  # One that is not open is UNAVAILABLE (tests/router/test_delivery.py).
    return await victim.call(made)


async def flood(victim: Victim, rng: Random) -> str:
    """Long prompts at once, whose client goes away in the middle of everything."""
    request = victim.request(rng, rng.randrange(1, victim.max_model_len - 64), max_tokens=64, n=rng.choice((1, 4, 256)))
    request.ClearField("seed")
    request.priority = rng.choice(_PRIORITIES)
    data = request.SerializeToString()
    return await _left([victim.call(data) for _ in range(24)], rng.choice((0.0, 0.02, 0.2, 1.0)))


async def slow_reader(victim: Victim, rng: Random) -> str:
    """Many tokens that are asked for and not read."""
    request = pb.GenerateRequest(text="a", sampling_params={"max_tokens": 400, "n": 64, "ignore_eos": True})
    return await victim.call(request, after_s=rng.uniform(1, 4), take=3)


async def verification(victim: Victim, rng: Random) -> str:
    """A verification of many cases under every condition, some of them several times, that is left after a while."""
    request = pb.VerifyRequest(conditions=rng.choices(_CONDITIONS, k=rng.choice((1, 4, 4000))))
    prompt = [rng.randrange(victim.vocab_size) for _ in range(rng.choice((3, 100, 10_000)))]
    for _ in range(rng.choice((1, 50, 300))):
        case = request.cases.add(seed=rng.getrandbits(62), prompt_token_ids=prompt)
        case.sampling_params.max_tokens = rng.choice((8, 200))
    return await _left([victim.call(request, method="Verify")], rng.uniform(0.5, 4.0))


async def score(victim: Victim, rng: Random) -> str:
    """Score many continuations, or ones that are too many, too long or no tokens, and go away in the middle of some."""
    count, longest = rng.choice(((1, 1.0), (16, 1.0), (256, 0.1), (257, 0.01), (256, 1.0), (4000, 0.01)))
    request = pb.ScoreRequest(priority=rng.choice(_PRIORITIES), token_texts=rng.random() < 0.5)
    length = rng.choice((0, 1, 100, victim.max_model_len // 2))
    request.prompt.token_ids.ids.extend(rng.randrange(victim.vocab_size) for _ in range(length))
    for _ in range(count):
        ids = [rng.randrange(victim.vocab_size + (rng.random() < 0.001))] * int(longest * victim.max_model_len / 2)
        request.continuations.add().token_ids.ids.extend(ids)
    call = victim.call(request, method="Score")
    return await (_left([call], rng.uniform(0.1, 4.0)) if rng.random() < 0.5 else call)


async def constraint(victim: Victim, rng: Random) -> str:
    """Constrain outputs by something large, deep, ambiguous or that is no constraint; leave in the middle of some."""
    kind, text = rng.choice(_constraints(rng.choice((3, 30, 300, 3000, 30_000))))
    sampling = {"max_tokens": rng.choice((4, 64)), "n": rng.choice((1, 1, 4, 64))}
    request = pb.GenerateRequest(token_ids={"ids": (1, 2, 3)}, sampling_params=sampling)
    structured = request.sampling_params.structured_outputs
    if kind == "choice":
        structured.choice.texts.extend(text.split(","))
    else:
        setattr(structured, kind, text)
    call = victim.call(request)
    return await (_left([call], rng.uniform(0.1, 4.0)) if rng.random() < 0.5 else call)


def _constraints(size: int) -> list[tuple[str, str]]:
    """Return constraints by their fields; `size`: characters, levels, alternatives or repetitions."""
    deep = min(size, 3000)  # Beyond that all are longer than a constraint may be.
    return [
        ("regex", "(a|b|ab)*" * (deep // 3) + "c"),
        ("regex", "(" * deep + "a" + ")*" * deep),
        ("regex", f"(.*x){{{size}}}"),
        ("regex", f"[\\w\\s]{{0,{size}}}(?=a)"),
        ("regex", f"(x{{0,{size}}}y?){{{size}}}"),
        ("regex", "[0-9]{1,16}"),
        ("json", '{"type":"array","items":' * deep + "{}" + "}" * deep),
        ("json", json.dumps({"properties": {f"p{k}": {"pattern": f"a{{{k}}}"} for k in range(deep)}})),
        ("json", '{"$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"}'),
        ("json", json.dumps({"enum": [str(k) * 5 for k in range(deep)]})),
        ("json", '{"type":"object"}'),
        ("json", "{" * size),
        ("grammar", "start: a\na: a a | " + "x" * deep),
        ("grammar", 'start: (s s s)*\ns: "a" | s s | "a" s "b" | '),
        ("grammar", "start: " + " | ".join(f'"{k}"' for k in range(deep))),
        ("choice", ",".join(str(k) for k in range(size))),
    ]


async def http_chat(victim: Victim, rng: Random) -> str:
    """Chats of many or odd messages, with deep schemas and tools."""
    size = rng.choice((1, 100, 10_000, 300_000))
    deep = min(size, 5000)
    bodies = (
        b'{"messages":[' + b'{"role":"user","content":"a"},' * size + b'{"role":"user","content":"b"}],"max_tokens":4}',
        b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":"a"},' * size + b"1]}]}",
        b'{"messages":[{"role":"user","content":"' + b"a {{ b }} " * size + b'"}],"max_tokens":4}',
        b'{"messages":[{"role":"user","content":"a"}],"tools":[' + b'{"type":"function"},' * size + b"{}]}",
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":4,"response_format":{"type":"json_schema",'
        b'"json_schema":{"name":"a","schema":' + b'{"items":' * deep + b"{}" + b"}" * deep + b"}}}",
        b'{"messages":' + b"[" * deep + b"]" * deep + b"}",
    )
    return await victim.post(rng.choice(bodies), path="/v1/chat/completions")


async def _left(calls: list[Awaitable[str]], after_s: float) -> str:
    """The status of a call that ends in time; all calls are cancelled after that."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    done, _ = await asyncio.wait(tasks, timeout=after_s)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return done.pop().result() if len(tasks) == len(done) == 1 else "left"


async def http_body(victim: Victim, rng: Random) -> str:
    """A large body for the gateway: text, numbers, nesting, or no JSON at all."""
    size = rng.choice((10_000, 1_000_000, 15_000_000))
    bodies = (
        b'{"prompt":"' + b"a" * size + b'"}',
        b'{"prompt":"' + b"\\u9fa5" * (size // 6) + b'"}',
        b'{"prompt":[' + b"1," * (size // 2) + b"1]}",
        b'{"prompt":[' + b"[1]," * (size // 4) + b"[1]]}",
        b'{"prompt":"a","logit_bias":{' + b'"1":1,' * (size // 6) + b'"2":1}}',
        b'{"prompt":"a","stop":[' + b'"x",' * (size // 4) + b'"x"]}',
        b'{"seed":' + b"9" * size + b"}",
        b"[" * size,
        b'{"a":' * (size // 5),
        rng.randbytes(size),
    )
    keys = (None, None, None, "", "Bearer ", "Bearer x", "Basic eDp5")
    return await victim.post(rng.choice(bodies), key=rng.choice(keys))


async def http_corner(victim: Victim, rng: Random) -> str:
    """Parameters at their limits and beyond, over HTTP."""
    name = rng.choice(list(_CORNERS))
    value = rng.choice((*_CORNERS[name], "x", None, [], {}, True, 1e400))
    shown = json.dumps(value).replace("Infinity", "1e999")
    return await victim.post(f'{{"prompt":[1,2,3],"max_tokens":4,"{name}":{shown}}}'.encode())


async def http_slow(victim: Victim, rng: Random) -> str:
    """A body that comes a piece at a time."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"prompt":"'
        for _ in range(rng.randrange(5, 30)):
            await asyncio.sleep(0.2)
            yield b"a" * rng.choice((1, 1000, 100_000))
        yield b'"}'

    return await victim.post(pieces())


ASSAULTS: dict[str, tuple[int, Callable[[Victim, Random], Awaitable[str]]]] = {
    "text": (20, big_text),
    "fitting text": (8, fitting_text),
    "ids": (10, big_ids),
    "wide": (8, wide),
    "corner": (20, corner),
    "changed": (20, changed),
    "flood": (4, flood),
    "slow reader": (3, slow_reader),
    "verification": (4, verification),
    "score": (6, score),
    "constraint": (10, constraint),
    "http body": (12, http_body),
    "http corner": (10, http_corner),
    "http slow": (3, http_slow),
    "http chat": (6, http_chat),
}
"""By name, with how often each is drawn."""


def draw(seed: int, number: int) -> tuple[str, Random]:
    """The assault of a number, and its random stream."""
    rng = Random(f"{seed} {number}")
    return rng.choices(list(ASSAULTS), [weight for weight, _ in ASSAULTS.values()])[0], rng


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a message, without making a Python object of each of its items."""
    return bytes([number << 3 | 2]) + varint(len(data)) + data
