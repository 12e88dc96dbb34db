"""A linear layer of 8-bit operands on CPU, forward and backward: the emulated form, products of pairs of bfloat16,
torch's product of 8-bit numbers, and the layer without rounding.

    python -m benchmarks.linear_fp8 [--clock wall] [--rounds 5] [--tokens 1024] [--inputs 1024] [--outputs 2816]
        [--dtype bfloat16] [--recipe row]

All are compiled by Inductor. Which form the backend takes is asked of the operator.
"""

from __future__ import annotations

from typing import Callable

import torch

from benchmarks import common
from mindspeed_fx.compat import inductor_scheduler
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels import linear_fp8 as fp8

ops = torch.ops.mindspeed


def both(forward: Callable, backward: Callable, recipe: str) -> Callable:
    """(result, gradients) of arguments and the gradient of the result."""
    return torch.compile(
        lambda x, w, grad: (forward(x, w, recipe), *backward(grad, x, w, recipe, [True, True])), backend="inductor"
    )


def main() -> None:
    args = common.arguments(
        rounds=5, tokens=1024, inputs=1024, outputs=2816, dtype="bfloat16", recipe="row", clock="wall"
    )
    torch.manual_seed(0)
    inductor_scheduler.split_equal_loops_alone()  # without it Inductor ends in an assertion on blocks of 32
    dtype = getattr(torch, args.dtype)
    x, w = torch.randn(args.tokens, args.inputs).to(dtype), torch.randn(args.outputs, args.inputs).to(dtype)
    grad = torch.randn(args.tokens, args.outputs).to(dtype)
    forms = {
        "emulated": (REGISTRY[ops.linear_fp8.default].reference, REGISTRY[ops.linear_fp8_backward.default].reference),
        "pairs": (fp8.forward_by(fp8.pairs), fp8.backward_by(fp8.pairs)),
        "_scaled_mm": (fp8.forward_by(fp8.scaled_mm), fp8.backward_by(fp8.scaled_mm)),
        "without rounding": (lambda x, w, _: x @ w.t(), lambda g, x, w, *_: (g @ w, g.t() @ x)),
    }
    steps, results = {}, {}
    for name, form in forms.items():
        if name == "_scaled_mm" and args.recipe in fp8.BLOCKS or name == "pairs" and args.recipe == "block":
            continue
        torch._dynamo.reset()
        step = both(*form, args.recipe)
        steps[name] = lambda step=step: step(x, w, grad)
        results[name] = steps[name]()
    chosen, _ = REGISTRY[ops.linear_fp8.default].choose("cpu", (x, w, args.recipe), {}, codegen=True)
    common.header(
        f"linear of 8-bit operands, {args.tokens} tokens, {args.inputs} to {args.outputs}, {args.dtype}, recipe "
        f"{args.recipe}, {args.clock} time; the backend takes: {chosen.kernel if chosen else 'emulated'}"
    )
    for name, result in results.items():
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(result, results["emulated"])]
        print(
            f"  {name}: relative distance of result and gradients from the emulated "
            f"{', '.join(f'{e:.1e}' for e in errors)}"
        )
    times = common.interleaved(steps, args.rounds, warmup=1, clock=args.clock)
    common.table(times, {}, "pairs" if "pairs" in times else "emulated")


if __name__ == "__main__":
    main()
