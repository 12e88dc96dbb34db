"""What train_hf.py shows besides what :mod:`gpt_report` has: work of a step, throughput, a sample."""

from __future__ import annotations

from typing import Any

import torch
from gpt_report import measured_tflops, utilization
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def flops_of(losses: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(FLOP of forward and backward of ``batch`` on one device, how they were counted).

    Counted by torch on tensors without storage: every matrix product once, attention as if nothing were masked. Where
    a model cannot run so, 6 for each parameter and token (Kaplan et al. 2020).
    """
    try:
        with FakeTensorMode() as mode:
            tensors = {**dict(losses.named_parameters()), **dict(losses.named_buffers())}
            ghosts = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
            inputs = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
            with FlopCounterMode(display=False) as counter:
                functional_call(losses, ghosts, (), inputs).backward()
        return float(counter.get_total_flops()), "matrix products counted"
    except Exception:  # noqa: BLE001  what reads values, as many experts and masks do, has none to read
        parameters = sum(p.numel() for p in losses.parameters() if p.ndim > 1)
        return 6.0 * parameters * batch["labels"].numel(), "6 for each parameter and token"


class Throughput:
    """Tokens (images) and FLOP a second, of which utilization is told.

    Args:
        world: ranks.
        given: peak of one rank in TFLOP/s; None: measured by matrix products.
        dtype, device: of these.
        unit: what is counted.
    """

    def __init__(self, world: int, given: float | None, dtype: torch.dtype, device: torch.device, unit: str):
        self.world, self.given, self.dtype, self.device, self.unit = world, given, dtype, device, unit
        self.steps: list[tuple[float, int, float]] = []
        self.peak = 0.0
        self.measure_peak()

    def measure_peak(self) -> None:
        """Raises the peak where the device does more now than before: a machine is not always as busy."""
        self.peak = max(self.peak, self.given or measured_tflops(self.dtype, self.device))

    def add(self, seconds: float, count: int, flops: float) -> None:
        """A step has taken so long, for so many tokens and so much work."""
        self.steps.append((seconds, count, flops))

    def describe(self) -> str:
        """Of the last twenty steps but the first of a run, which compiles."""
        steps = (self.steps[1:] or self.steps)[-20:]
        rates = sorted((count / seconds, flops / seconds) for seconds, count, flops in steps)
        rate, work = rates[len(rates) // 2]
        return f"{rate:.0f} {self.unit}s/s, {utilization(work, self.peak * 1e12 * self.world)}"

    def describe_all(self) -> str:
        """The first step, and the median of the rest; where a run is of one step, that. The last bracket is open."""
        rest = sorted(seconds for seconds, *_ in self.steps[1:] or self.steps)
        return (
            f"first step (with compilation) {self.steps[0][0]:.1f} s, median step {rest[len(rest) // 2] * 1e3:.0f} ms, "
            f"{self.describe()} of {self.peak:.2f} TFLOP/s per rank ({str(self.dtype).removeprefix('torch.')}, "
            f"{'given' if self.given else 'the best product measured'}"
        )


@torch.no_grad()
def sample(model: nn.Module, kind: str, batch: dict[str, torch.Tensor], vocabulary: Any, length: int) -> str:
    """Text that the model goes on with after the beginning of a held-out row (causal), or that it makes of one with
    masks (sequence to sequence); every rank calls it, and every parameter is gathered when it is read.
    """
    training = model.training
    model.eval()
    ids = batch["input_ids"][:1, : length if kind == "seq2seq" else min(32, length)]
    tokens = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        pad_token_id=vocabulary.pad,
        eos_token_id=vocabulary.eos,
        **({"decoder_start_token_id": vocabulary.start} if kind == "seq2seq" else {}),
    )
    model.train(training)
    new = tokens[0] if kind == "seq2seq" else tokens[0, ids.shape[1] :]
    return f"sample: {vocabulary.decode(ids[0].tolist())!r} -> {vocabulary.decode(new.tolist())!r}"
