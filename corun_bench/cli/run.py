"""`corun bench`: systems side by side. `corun_bench.command` does the work; it needs a node's packages and more."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from corun.config.extras import needs_extra
from corun_bench.options import BenchOptions


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions):
    """Measure systems side by side, and compare their bits.

    All systems get the same model, prompts and GPUs, and one client loop drives them all.

    examples:
      corun bench                                             the tiny model on this machine's CPU
      corun bench --model /models/qwen3 --gpus 0 --systems std,bi,colocated,cluster --workloads paper
      corun bench --model /models/qwen3 --gpus 0 1 --systems std,pd-std,cluster:1p1d,cluster:shared
      corun bench --systems --url http://127.0.0.1:8000       any OpenAI-compatible server
      corun bench compare a.json b.json                       two results
      corun bench report result.json -o report                pictures and a page
      corun bench kernels | router                            kernels of this device, capacity of a router
      corun bench serve --base-url http://127.0.0.1:8000 …    vLLM's own client, vllm bench serve

    Systems: std (stock vLLM), bi (its batch-invariant mode; GPU only), colocated (the paper's CoRun in one engine),
    colocated+ladder (with smaller decode steps where they give the same bits), pd-std (stock prefill and decode over
    NIXL), cluster (this project), std+nosplit and std+isolated (steps of the ablation). The placement of a pair follows
    a colon: cluster:1p1d, cluster:2p2d, cluster:shared (both on every GPU); a second colon sets its slots:
    cluster:1p1d:512. All others run one engine per GPU.

    Workloads: in=512,out=256; burstgpt, sharegpt, blazedit (samples of their shape made for this project, or =FILE);
    rl=32x8,in=512,out=256 (prompts x samples); paper (the paper's six). Every request generates all its tokens
    (ignore_eos).

    Ctrl-C ends all processes and keeps what was measured. Exit codes: 0 ok, 1 something could not be measured,
    2 nothing was started, 130 interrupted.
    """

    def run(self) -> int:
        with needs_extra("corun bench", "cpu"):
            command = importlib.import_module("corun_bench.command")
        code: int = command.run(self)
        return code
