"""A client comes back with what it has: the router sends the rest of the same output, or says that it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corun.errors import ContractMismatchError, DataLossError, InvalidArgumentError
from corun.params import SamplingParams, derive_seed
from corun.receipt import output_digest
from corun.rpc import codec
from corun.types import FinishReason, ResumePoint
from corun.v1 import cluster_service_pb2 as pb
from router.output import Outbox, Piece, SampleOutput
from router.text import ByteLevelDetokenizer
from tests.clusters import Output, cluster, generate, send, take

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=40, logprobs=True)

TEXTS = {
    "ascii": (b"once upon a time", ()),
    "characters of one to four bytes": ("aé€😀b€€é😀".encode(), ()),
    "a stop string that does not come": ("ab ab€ ab".encode(), ("abc", "€ abx")),
    "a stop string that cuts": ("aéb€😀 stop, and more".encode(), ("stop", "top,")),
    "an unfinished character": ("aé€".encode() + "😀".encode()[:2], ()),
    "an unfinished character after a broken one": (b"a\xff" + "é".encode() + b"\xe2\x82", ("zz",)),
    "a stop string within a character's wait": ("x€€y".encode(), ("€y",)),
    "a held back start of a stop string at the end": ("ab€ ab".encode(), ("abc", "b€ abc")),
    "a stop token": (b"ab\x01", ("b!",)),
}


class Run:
    """One call's run of an output whose tokens are bytes; every state in which a message may have left is noted."""

    def __init__(self, params: SamplingParams, received: ResumePoint | None = None) -> None:
        self.outbox = Outbox()
        self.output = SampleOutput(
            sample_index=0,
            seed=7,
            params=params,
            detokenizer=ByteLevelDetokenizer(lambda token_id: bytes([token_id]), {}),
            outbox=self.outbox,
            received=received,
            with_token_texts=True,
        )
        self.text, self.ids, self.token_texts = "", list[int](), list[str]()
        self.states: list[tuple[list[int], str]] = []

    def over(self, data: bytes) -> Run:
        for token_id in data:
            ended = self.output.take(token_id, logprob(token_id))
            self._note()
            if ended:
                break
        self.reason = self.output.end(FinishReason.LENGTH)
        self._note()
        return self

    def _note(self) -> None:
        piece: Piece | None = self.outbox._pending.pop(0, None)
        if piece is not None:
            assert piece.logprobs == [logprob(token_id) for token_id in piece.token_ids]
            self.ids += piece.token_ids
            self.text += piece.text
            self.token_texts += piece.token_texts or ()
        self.states.append((list(self.ids), self.text))


def logprob(token_id: int) -> float:
    return -token_id / 4


def point(ids: list[int], text_bytes: int) -> ResumePoint:
    digest = output_digest(ids, [logprob(token_id) for token_id in ids])
    return ResumePoint(sample_index=0, seed=7, num_tokens=len(ids), output_digest=digest, text_bytes=text_bytes)


@pytest.mark.parametrize("name", TEXTS)
def test_every_cut_gives_the_rest_and_no_more(name: str) -> None:
    """A client may also have kept text and tokens up to different places."""
    data, stops = TEXTS[name]
    params = SamplingParams(max_tokens=100, stop=stops, stop_token_ids=[1])
    whole = Run(params).over(data)
    assert "".join(whole.token_texts).startswith(whole.text.removesuffix("\N{REPLACEMENT CHARACTER}"))
    lengths = [(n, length) for n in range(len(whole.ids) + 1) for length in range(len(whole.text) + 1)]
    assert {(len(ids), len(text)) for ids, text in whole.states} <= set(lengths)
    for num_tokens, length in lengths:
        received = point(whole.ids[:num_tokens], len(whole.text[:length].encode()))
        rest = Run(params, received).over(data)
        assert (rest.ids, rest.text) == (whole.ids[num_tokens:], whole.text[length:])
        assert rest.token_texts == whole.token_texts[num_tokens:]
        assert (rest.reason, rest.output.hexdigest()) == (whole.reason, whole.output.hexdigest())


OTHER = "tokens received are not those of this sample"


@pytest.mark.parametrize(
    ("received", "data", "message"),
    [
        (replace(point(list(b"abcd"), 0), output_digest="0" * 64), b"abcdefgh", OTHER),
        (replace(point(list(b"abcd"), 0), output_digest=""), b"abcdefgh", OTHER),
        (replace(point(list(b"abcd"), 0), num_tokens=3), b"abcdefgh", OTHER),
        (point(list(b"abcde"), 0), b"abcd", "5 tokens were received of 4"),
        (point(list(b"ab"), 5), b"abcd", "more text was received than the output has"),
        (point(list("a€".encode()), 2), "a€b".encode(), "within a character"),
    ],
)
def test_what_was_received_and_cannot_be_is_data_loss(received: ResumePoint, data: bytes, message: str) -> None:
    run = Run(SamplingParams(max_tokens=100), received)
    with pytest.raises(DataLossError, match=message):
        run.over(data)
    assert message != OTHER or (run.ids, run.text) == ([], ""), "nothing is sent before the digest was equal"


def test_a_node_fault_while_resuming_changes_nothing() -> None:
    data = b"abcdefgh"
    for fault_at in range(len(data)):
        run = Run(SamplingParams(max_tokens=100), point(list(data[:4]), 4))
        for token_id in data[:fault_at]:
            assert not run.output.take(token_id, logprob(token_id))
        run.output.restart()
        assert run.over(data).reason is FinishReason.LENGTH
        assert (bytes(run.ids), run.text) == (data[4:], "efgh")


def request(
    params: SamplingParams = PARAMS, *points: ResumePoint, request_id: str = "r", fingerprint: str = ""
) -> pb.GenerateRequest:
    made = codec.generate_request(PROMPT, params, request_id=request_id)
    return codec.resumed_request(made, points, fingerprint)


def received(output: Output, num_tokens: int, text: str, *, index: int = 0, done: bool = False) -> ResumePoint:
    return ResumePoint(
        sample_index=index,
        seed=output.seed,
        num_tokens=num_tokens,
        output_digest=output_digest(output.token_ids[:num_tokens], output.logprobs[:num_tokens]),
        text_bytes=len(text.encode()),
        done=done,
    )


class TestOverTheWire:
    async def test_cuts_of_a_stream(self, model: str) -> None:
        """A few, the first and the last among them; `test_every_cut_gives_the_rest_and_no_more` has all."""
        async with cluster(model) as one, cluster(model) as two, one.stub() as stub:
            two_fingerprint = (await two.status()).fingerprint
            for stop in ((), ("a", "e", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}e")):
                params, whole, states = replace(PARAMS, stop=stop), Output(), [(0, "")]
                async for message in stub.Generate(request(params), timeout=10):
                    take(whole, message)
                    states.append((len(whole.token_ids), whole.text))
                for num_tokens, text in [*states[:-1:7], *states[-2:]]:
                    again = request(params, received(whole, num_tokens, text), fingerprint=two_fingerprint)
                    (rest,) = await send(two, again)
                    assert rest.token_ids == whole.token_ids[num_tokens:]
                    assert rest.logprobs == whole.logprobs[num_tokens:]
                    assert text + rest.text == whole.text
                    for name in ("output_digest", "num_output_tokens", "seed", "request_id"):
                        assert getattr(rest.receipt, name) == getattr(whole.receipt, name)

    async def test_a_finished_sample_gives_only_its_end(self, model: str) -> None:
        async with cluster(model) as fake:
            (whole,) = await generate(fake, PROMPT, PARAMS, request_id="r")
            (rest,) = await send(fake, request(PARAMS, received(whole, 40, whole.text)))
            assert (rest.token_ids, rest.text, rest.messages) == ([], "", 1)
            assert rest.receipt == replace(whole.receipt)
            assert len(fake.nodes[0].engine.prefilled) == 2

    async def test_samples_that_are_done_are_not_run_again(self, model: str) -> None:
        async with cluster(model) as fake:
            params = replace(PARAMS, n=3)
            wholes = await generate(fake, PROMPT, params, request_id="r")
            points = [received(wholes[i], 40, wholes[i].text, index=i, done=True) for i in (0, 2)]
            again = request(params, *points, received(wholes[1], 7, "", index=1))
            rest = Output()
            async with fake.stub() as stub:
                async for message in stub.Generate(again, timeout=10):
                    assert message.sample_index == 1
                    rest.token_ids.extend(message.token_ids)
            assert rest.token_ids == wholes[1].token_ids[7:]
            prefill = fake.nodes[0].service
            assert prefill.metrics.prompts.value + prefill.metrics.shared_prompts.value == 4

    async def test_other_tokens_are_data_loss_and_no_nodes_fault(self, model: str) -> None:
        async with cluster(model) as fake:
            (whole,) = await generate(fake, PROMPT, PARAMS, request_id="r")
            wrong = replace(received(whole, 9, ""), output_digest="0" * 64)
            with pytest.raises(DataLossError, match="the 9 tokens received are not those of this sample"):
                await send(fake, request(PARAMS, wrong))
            status = await fake.status()
            assert status.mismatches == 0
            assert {node.state.value for node in status.nodes} == {"ready"}

    async def test_another_fingerprint_or_seed_key_is_refused_before_anything_runs(self, model: str) -> None:
        async with cluster(model) as fake:
            with pytest.raises(ContractMismatchError) as caught:
                await send(fake, request(fingerprint="f" * 64))
            own = (await fake.status()).fingerprint
            assert caught.value.differences["fingerprint"][0][:8] == "f" * 8
            assert caught.value.differences["fingerprint"][1][:8] == own[:8]
            elsewhere = Output(seed=derive_seed(b"another key", "r"))
            with pytest.raises(ContractMismatchError, match="another seed"):
                await send(fake, request(PARAMS, received(elsewhere, 0, "")))
            assert fake.nodes[0].engine.prefilled == []

    async def test_points_that_cannot_be(self, model: str) -> None:
        good = received(Output(seed=derive_seed(bytes(32), "r")), 0, "")
        refused = {
            "resume[0].sample_index": request(PARAMS, replace(good, sample_index=1)),
            "resume[0].num_tokens": request(PARAMS, replace(good, num_tokens=41)),
            "resume": request(PARAMS, replace(good, done=True)),
            "resume[1].sample_index": request(PARAMS, good, good),
            "request_id": request(PARAMS, good, request_id=""),
        }
        async with cluster(model) as fake:
            for field, message in refused.items():
                with pytest.raises(InvalidArgumentError) as caught:
                    await send(fake, message)
                assert caught.value.field == field
