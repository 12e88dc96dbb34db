"""The last linear and the loss, one training step on CPU: eager, Inductor and mindspeed unfused, mindspeed in chunks,
interleaved.

The gate of ``fusion.linear_cross_entropy`` is set by what this prints: chunks are forced here, however small the
logits.

    python -m benchmarks.linear_cross_entropy [--rounds 7] [--vocab 128256] [--hidden 512] [--tokens 1024,2048]
    OMP_NUM_THREADS=1 python -m benchmarks.linear_cross_entropy --clock processor    # on a machine that others use too
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import common


class Head(nn.Module):
    """Hidden states [1, tokens, hidden], here a parameter so that they get a gradient, a linear, and the loss."""

    def __init__(self, tokens: int, hidden: int, vocab: int):
        super().__init__()
        self.hidden, self.linear = nn.Parameter(torch.randn(1, tokens, hidden)), nn.Linear(hidden, vocab, bias=False)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        logits = self.linear(self.hidden)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def main() -> None:
    args = common.arguments(rounds=7, vocab=128256, hidden=512, tokens="1024,2048", clock="wall")
    clock = {"wall": time.perf_counter, "processor": time.process_time}[args.clock]
    for tokens in map(int, args.tokens.split(",")):
        torch.manual_seed(0)
        model = Head(tokens, args.hidden, args.vocab)
        inputs = {"labels": torch.randint(0, args.vocab, (1, tokens))}
        steps = common.rivals(model, inputs, lambda loss: loss, options={"enable": ["fusion.linear_cross_entropy"]})
        torch._dynamo.reset()
        unfused = torch.compile(
            model,
            backend="mindspeed",
            options={"disable": ["fusion.linear_cross_entropy", "fusion.linear_cross_entropy_backward"]},
        )
        steps["unfused"] = common.training_step(model, unfused, inputs, lambda loss: loss)
        common.header(
            f"linear and cross-entropy: vocab {args.vocab}, hidden {args.hidden}, {tokens} tokens, float32, "
            f"{args.clock} time"
        )
        with mock.patch.object(common, "time", SimpleNamespace(perf_counter=clock)):
            times = common.interleaved(steps, args.rounds)
        peaks = {name: common.peak_bytes(step, common.gradient_bytes(model)) for name, step in steps.items()}
        common.table(times, peaks, "mindspeed")


if __name__ == "__main__":
    main()
