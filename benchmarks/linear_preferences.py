"""Losses of preferences and of distillation from hidden states on CPU, forward and backward: written out on whole
logits and compiled by Inductor, and ours in chunks.

    python -m benchmarks.linear_preferences [--clock wall] [--rounds 3] [--vocab 128256] [--hidden 512] [--tokens 1024]
        [--losses grpo,dpo,jsd]

Gradients are not counted as memory of either, since both have them.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F

from benchmarks import common

ops = torch.ops.mindspeed


def log_probs(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.t()
    return logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def grpo(numbers: tuple) -> tuple[Callable, Callable]:
    target, advantages, old, reference = numbers

    def unfused(hidden, weight):
        logp = log_probs(hidden, weight, target)
        ratio = (logp - old).exp()
        term = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        behind = reference - logp
        return (term + 0.04 * (behind.exp() - behind - 1)).mean()

    return unfused, lambda h, w: ops.linear_grpo(h, w, None, target, advantages, None, old, reference, beta=0.04)[0]


def dpo(numbers: tuple) -> tuple[Callable, Callable]:
    target = numbers[0].view(4, -1)

    def unfused(hidden, weight):
        sums = log_probs(hidden.view(*target.shape, -1), weight, target).sum(1)
        return -F.logsigmoid(0.1 * (sums[:2] - sums[2:])).mean()

    return unfused, lambda h, w: ops.linear_dpo(h.view(*target.shape, -1), w, None, target)[0]


def jsd(teacher: tuple) -> tuple[Callable, Callable]:
    def unfused(hidden, weight):
        s, t = (F.log_softmax(x @ w.t(), -1) for x, w in ((hidden, weight), teacher))
        m = torch.logaddexp(s, t) + torch.tensor(0.5).log()
        return (F.kl_div(m, t, reduction="sum", log_target=True) + F.kl_div(m, s, reduction="sum", log_target=True)) / 2

    return unfused, lambda h, w: ops.linear_jsd(h, w, None, *teacher, weights=torch.ones(h.shape[0]))


def main() -> None:
    args = common.arguments(rounds=3, vocab=128256, hidden=512, tokens=1024, losses="grpo,dpo,jsd", clock="wall")
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = (torch.randn(args.vocab, args.hidden) / args.hidden**0.5).requires_grad_()
    numbers = torch.randint(0, args.vocab, (args.tokens,)), *torch.randn(3, args.tokens)
    numbers = *numbers[:2], *(x - 11 for x in numbers[2:])
    teacher = torch.randn(args.tokens, args.hidden), weight.detach().flip(1)
    for loss in args.losses.split(","):
        pair = {"grpo": lambda: grpo(numbers), "dpo": lambda: dpo(numbers), "jsd": lambda: jsd(teacher)}[loss]()
        values, steps = [], {}
        for name, f in zip(("inductor", "mindspeed"), pair):
            torch._dynamo.reset()
            compiled = torch.compile(f, backend=name)
            steps[name] = lambda compiled=compiled: torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
            values.append(compiled(hidden, weight).item())
        common.header(
            f"{loss}: vocab {args.vocab}, hidden {args.hidden}, {args.tokens} tokens, float32, {args.clock} time; "
            f"values {values[0]:.6g} and {values[1]:.6g}"
        )
        times = common.interleaved(steps, args.rounds, warmup=1, clock=args.clock)
        returned = 4 * (hidden.numel() + weight.numel())
        common.table(times, {name: common.peak_bytes(step, returned) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
