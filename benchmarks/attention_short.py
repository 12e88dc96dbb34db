"""Attention of few rows on CPU: causal, with a mask, over packed documents; from how many rows on the fused operators
pay.

    python -m benchmarks.attention_short [--rows 64,128,256,384,512,768,1024] [--rounds 7]

Forward and backward, 2 x 8 heads of 64, documents of 64 tokens, their numbers by ``cumsum`` of their last tokens.
"fused" is ours with ``enable=["fusion.attention"]``, "default" ours without; generated code around the attention, and
in its place where it is left alone.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common

BATCH, HEADS, DIM, DOCUMENT = 2, 8, 64, 64


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return _weighted(q, k, v, _tril(q.shape[2]))


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return _weighted(q, k, v, (last == 0)[:, None, None, :])


def documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    number = last.cumsum(-1) - last
    return _weighted(q, k, v, (number[:, None, :, None] == number[:, None, None, :]) & _tril(q.shape[2]))


def _tril(rows: int) -> torch.Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()


def _weighted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return F.softmax((q @ k.transpose(-1, -2) / DIM**0.5).masked_fill(~allowed, -torch.inf), -1) @ v


def steps(attention: Any, rows: int, dtype: torch.dtype) -> dict[str, common.Step]:
    torch.manual_seed(0)
    arguments = [torch.randn(BATCH, HEADS, rows, DIM, dtype=dtype, requires_grad=True) for _ in range(3)]
    last = (torch.arange(rows) % DOCUMENT == DOCUMENT - 1).long().expand(BATCH, rows).contiguous()
    rivals: dict[str, Any] = {
        "inductor": dict(backend="inductor"),
        "default": dict(backend="mindspeed"),
        "fused": dict(backend="mindspeed", options={"enable": ["fusion.attention"]}),
    }
    results = {}
    for name, how in rivals.items():
        torch._dynamo.reset()
        compiled = torch.compile(attention, dynamic=False, **how)

        def step(compiled: Any = compiled) -> None:
            for x in arguments:
                x.grad = None
            compiled(*arguments, last).float().square().mean().backward()

        step()
        results[name] = step
    return results


def main() -> None:
    args = common.arguments(rows="64,128,256,384,512,768,1024", rounds=7)
    common.header(
        f"attention, {BATCH} x {HEADS} heads of {DIM}, forward and backward; medians of {args.rounds} interleaved"
    )
    print(f"{'rows':>5} {'mask':<10} {'type':<9}{'inductor ms':>12} {'default':>8} {'fused':>8}   of inductor's time")
    for dtype in (torch.float32, torch.bfloat16):
        for rows in map(int, args.rows.split(",")):
            for attention in (causal, padded, documents):
                times = {
                    n: statistics.median(t)
                    for n, t in common.interleaved(steps(attention, rows, dtype), args.rounds).items()
                }
                shown = "".join(f" {times[n] / times['inductor']:>8.3f}" for n in ("default", "fused"))
                print(
                    f"{rows:>5} {attention.__name__:<10} "
                    f"{str(dtype).removeprefix('torch.'):<9}{times['inductor'] * 1e3:>12.2f}{shown}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
