"""Train the tiny model with GRPO on a laptop, and compare rollout and recomputed log probabilities bit by bit.

    python examples/grpo.py                  # two steps, a few minutes on two cores; needs what `make setup` installs

Each step starts a cluster with the policy's weights, draws groups of samples with `generate_many`, computes their log
probabilities again, and takes one step of the policy with torch. There is no update of weights in a running cluster:
weights are part of the contract, so the next step writes a checkpoint and starts a cluster with it, and every receipt
names the policy by its fingerprint.

Log probabilities are computed again in three ways:

- drawn again from their seeds, in another order and company: no bit differs;
- scored (`client.score`), a group in a request, and again alone: the two agree in every bit. Whether they must have the
  bits of what was drawn is in the answer (`equals_generation`): certificates show it or not;
- by a plain forward pass in torch with the same weights and the same precision, as trainers do: the control.

The reward is the share of the letter e in a text, which a random model can learn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from corun import Client, CorunError, Generations, Sample, SamplingParams, Scores
from corun.cli.own_cluster import own_cluster
from corun.models import TINY, made

PROMPTS = ("Once upon a time", "The old man opened the window", "In the morning the town", "Under the great tree")
PARAMS = SamplingParams(max_tokens=24, logprobs=True)
LEARNING_RATE, CLIP = 1e-3, 0.2
LogProbs = Sequence[Sequence[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--group", type=int, default=16, help="samples of each prompt")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps = {args.steps}: must be at least 1")
    if args.group < 2:
        parser.error(f"--group = {args.group}: must be at least 2, since a reward is compared with those of its group")
    same = True
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(shutil.copytree(made(TINY), Path(folder) / "policy-0"))
        policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
        for step in range(1, args.steps + 1):
            rollouts, agrees = roll_out(checkpoint, step, args.group)
            same = same and agrees
            learn(policy, optimizer, rollouts)
            if step < args.steps:
                checkpoint = save(policy, checkpoint, Path(folder) / f"policy-{step}")
    print("every bit that must agree agreed" if same else "BITS DIFFER")
    return 0 if same else 3


def roll_out(checkpoint: Path, step: int, group: int) -> tuple[Generations, bool]:
    """Draw groups with a cluster of these weights, and compare. Return them, and whether all agrees that must."""
    seeds = [1000 * step + index for index in range(len(PROMPTS))]
    with own_cluster(str(checkpoint), {"colocated": 1}, lambda line: None) as address, Client(address) as client:
        done = client.generate_many(PROMPTS, PARAMS, n=group, seeds=seeds)
        again = client.generate_many(PROMPTS[::-1], PARAMS, n=group, seeds=seeds[::-1])
        dtype = json.loads(client.get_cluster().nodes[0].node.contract_json)["model"]["dtype"]
        together, alone = score(client, done), score_alone(client, done)
    samples = [sample for generation in done for sample in generation.samples]
    claimed = all(each.equals_generation for found in together for each in found.scores)
    rewards = [reward(sample) for sample in samples]
    fingerprint = done[0].receipt.fingerprint
    print(f"step {step}: policy {fingerprint[:12]}, {len(samples)} samples, mean reward {mean(rewards):.4f}")
    drawn, scores = [sample.logprobs for sample in samples], logprobs(together)
    note = "certified to be equal" if claimed else "no certificate on this machine that they are equal"
    found = [
        differ("drawn again", drawn, [sample.logprobs for each in again[::-1] for sample in each.samples]),
        differ("scored, and scored again alone", scores, logprobs(alone)),
        differ(f"drawn, and scored: {note}", drawn, scores) * claimed,
    ]
    differ(f"drawn, and computed by plain torch in {dtype}", drawn, in_torch(checkpoint, dtype, done))
    return done, not any(found)


def score(client: Client, done: Generations) -> list[Scores]:
    """Return the scores of all samples, a request for each prompt."""
    return [client.score(each.prompt_token_ids, [sample.token_ids for sample in each.samples]) for each in done]


def score_alone(client: Client, done: Generations) -> list[Scores]:
    """Return the scores of all samples in their order, each asked for by itself, the last one first."""
    pairs = [(each.prompt_token_ids, sample.token_ids) for each in done for sample in each.samples]
    return [client.score(prompt, [tokens]) for prompt, tokens in pairs[::-1]][::-1]


def logprobs(found: Sequence[Scores]) -> LogProbs:
    return [score.logprobs for scores in found for score in scores.scores]


def differ(what: str, one: LogProbs, other: LogProbs) -> int:
    """Print and return how many log probabilities differ. Two fp32 values are equal only if all their bits are."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    count = sum(struct.pack("<f", a) != struct.pack("<f", b) for a, b in pairs)  # 0.0 and -0.0 are equal as numbers.
    print(f"  {count:>5} of {len(pairs)} log probabilities differ: {what}")
    return count


def reward(sample: Sample) -> float:
    return sample.text.count("e") / max(1, len(sample.text))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def in_torch(checkpoint: Path, dtype: str, done: Generations) -> LogProbs:
    """Return the log probabilities that a forward pass of transformers gives with weights of this type."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    with torch.no_grad():
        return [
            forward(model, each.prompt_token_ids, sample.token_ids).tolist() for each in done for sample in each.samples
        ]


def forward(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the [tokens] fp32 log probabilities of tokens after a prompt."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)[range(len(tokens)), list(tokens)]


def learn(policy: Any, optimizer: torch.optim.Optimizer, rollouts: Generations) -> None:
    """Take one step towards samples with more reward than their group, by GRPO's clipped objective."""
    optimizer.zero_grad()
    for generation in rollouts:
        rewards = torch.tensor([reward(sample) for sample in generation.samples])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(generation.samples, advantages, strict=True):
            ratio = torch.exp(
                forward(policy, generation.prompt_token_ids, sample.token_ids) - torch.tensor(sample.logprobs)
            )
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            (-gain / (len(rollouts) * len(generation.samples))).backward()
    optimizer.step()


def save(policy: Any, before: Path, folder: Path) -> Path:
    """Write the policy beside the files of the checkpoint before it: its tokenizer and its configuration."""
    shutil.copytree(before, folder)
    (folder / "VERSION").unlink(missing_ok=True)  # These weights are no longer the built-in ones.
    policy.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CorunError as error:
        sys.exit(f"{type(error).__name__}: {error}")
