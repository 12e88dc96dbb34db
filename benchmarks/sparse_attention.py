"""Attention to chosen keys beside attention to all under their mask: processor time and peak memory.

    python -m benchmarks.sparse_attention [--length 4096] [--heads 16] [--count 256] [--rounds 3]

The absorbed form of latent attention, 512 channels and 64 that are rotated, float32, one thread, forward and backward;
the choice, at random among earlier tokens, is made before. "mask": torch's attention under the mask of the choice, as
compiled without MindSpeed's flags; "operator": ``mindspeed::sparse_attention``. Both gradients are compared first.
"""

from __future__ import annotations

import statistics

import torch

import mindspeed_fx.kernels  # noqa: F401
from benchmarks import common

LATENT, WIDTH, SCALE = 512, 576, 0.05


def choose(length: int, count: int) -> torch.Tensor:
    """[1, length, count], int32: itself and earlier tokens, -1 where there are fewer."""
    scores = torch.rand(length, length).masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), -1.0)
    best, place = scores.topk(count, -1)
    return place.masked_fill(best < 0, -1).to(torch.int32).unsqueeze(0)


def main() -> None:
    arg = common.arguments(length=4096, heads=16, count=256, rounds=3)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q = torch.randn(1, arg.length, arg.heads, WIDTH, requires_grad=True)
    k = torch.randn(1, arg.length, 1, WIDTH, requires_grad=True)
    indices = choose(arg.length, arg.count)
    seen = torch.zeros(1, arg.length, arg.length + 1, dtype=torch.bool)
    seen = seen.scatter_(-1, torch.where(indices < 0, arg.length, indices).long(), True)[:, None, :, :-1]

    def mask() -> tuple[torch.Tensor, ...]:
        heads = [x.transpose(1, 2).expand(-1, arg.heads, -1, -1) for x in (k, k[..., :LATENT])]
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *heads, seen, scale=SCALE)
        return torch.autograd.grad(out.square().sum(), [q, k])

    def operator() -> tuple[torch.Tensor, ...]:
        out, _ = torch.ops.mindspeed.sparse_attention(q, k, None, indices, SCALE, LATENT)
        return torch.autograd.grad(out.square().sum(), [q, k])

    steps = {"mask": mask, "operator": operator}
    for one, other in zip(mask(), operator(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    times = common.interleaved(steps, arg.rounds, warmup=0, clock="processor")
    common.header(f"{arg.length} tokens, {arg.count} chosen, {arg.heads} heads; processor time")
    for name, step in steps.items():
        peak = common.peak_bytes(step, 0) / 2**20
        print(f"{name:<10}{statistics.median(times[name]):>10.2f} s{peak:>10.0f} MiB")


if __name__ == "__main__":
    main()
