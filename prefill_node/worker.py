"""The vLLM worker of a prefill node: the stock worker, with observation and a self-test.

Prefill steps need no padding: the shape of an isolated prompt's steps depends on its own length alone.
"""

from __future__ import annotations

import torch
from vllm.sampling_params import SamplingParams

from corun.node.vllm.selftest import Stepper
from corun.node.vllm.worker import NodeWorker
from prefill_node.certify import certify


class PrefillWorker(NodeWorker):
    """Computes isolated prompts with the stock model runner."""

    def certify(self) -> str:
        """Return the first difference that the self-test finds (prefill_node/certify.py); empty if there is none."""
        chunk_size = self.vllm_config.scheduler_config.max_num_batched_tokens
        buckets = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True, detokenize=False)
        with torch.inference_mode():
            finding = certify(Stepper(self), chunk_size, sorted(buckets), sampling)
        torch.accelerator.empty_cache()
        return finding
