"""The Triton kernels on a GPU against torch.compile and, where installed, Liger (liger-kernel) and QuACK
(quack-kernels).

    python -m benchmarks.kernels_cuda --rounds 30 TRITON_INTERPRET=1 python -m benchmarks.kernels_cuda --device cpu
    --elements 65536 --rounds 1    tries the script itself

Every rival computes the same function of the same 16-bit inputs, forward and backward; ours goes through
backend="mindspeed" and is refused if another kernel was chosen. Times are medians over interleaved rounds, one call at
a time between device events, behind a large copy that hides the launch and empties the L2 cache. GB/s count what must
move: every input read once and every output written once; % is of the copy's own bandwidth, measured first. Liger's
loss computes its gradient in the forward, so compare losses by the sum of both.
not run yet: no GPU was lent
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F

from benchmarks import common
from mindspeed_fx.report import recorder

WIDTHS = [2**k for k in range(11, 18)]
HEAD = 128
OURS = "mindspeed"


@dataclass(frozen=True)
class Problem:
    """One operator at one width."""

    define: Callable[..., torch.Tensor]
    """The function in plain torch; what torch.compile and we are given."""
    leaves: list[torch.Tensor]
    others: list[torch.Tensor]
    moved: tuple[int, int]
    """Bytes that must move forward and backward."""
    rivals: dict[str, Callable[..., torch.Tensor]]
    """From copies of leaves and others to the result; a missing package is a missing key."""


def optional(name: str, module: str, attribute: str) -> Any:
    """``module.attribute``, or None where the package ``name`` is not installed."""
    try:
        return getattr(__import__(module, fromlist=[attribute]), attribute)
    except ImportError as e:
        print(f"# without {name}: {e}")
        return None


def present(**rivals: Callable | None) -> dict[str, Callable]:
    return {name: run for name, run in rivals.items() if run is not None}


# ---------------------------------------------------------------- the operators


def rms_norm(width: int, elements: int, new: Callable) -> Problem:
    def define(x, w):
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    x, w = new(elements // width, width), new(width)
    return Problem(
        define,
        [x, w],
        [],
        (2 * size(x), 3 * size(x)),
        present(
            liger=LIGER_NORM and (lambda x, w: LIGER_NORM.apply(x, w, 1e-5, 0.0, "llama", False)),
            quack=QUACK_NORM and (lambda x, w: QUACK_NORM(x, w, eps=1e-5)),
        ),
    )


def swiglu(width: int, elements: int, new: Callable) -> Problem:
    gate, up = new(elements // width, width), new(elements // width, width)
    rivals = present(liger=LIGER_SWIGLU and (lambda gate, up: LIGER_SWIGLU.apply(gate, up)))
    return Problem(lambda gate, up: F.silu(gate) * up, [gate, up], [], (3 * size(gate), 5 * size(gate)), rivals)


def rope(width: int, elements: int, new: Callable) -> Problem:
    """``width`` is heads * 128; x [batch 1, tokens, heads, 128] as Hugging Face models transpose it."""

    def define(x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def liger(x, cos, sin):
        # It takes queries and keys, and rotates in place: half of the heads each, cloned as a model's projections would
        # be.
        q, k = (t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for t in x.chunk(2, 1))
        return torch.cat(LIGER_ROPE.apply(q, k, cos, sin), 1)

    tokens = elements // width
    angle = torch.arange(tokens)[:, None] * torch.rand(HEAD // 2)
    cos, sin = (f(torch.cat((angle, angle), -1)).to(new(1)) for f in (torch.cos, torch.sin))
    x = new(1, tokens, width // HEAD, HEAD).transpose(1, 2)
    rivals = present(
        liger=LIGER_ROPE and liger,
        quack=QUACK_ROPE
        and (
            lambda x, cos, sin: QUACK_ROPE(x.transpose(1, 2), cos[:, : HEAD // 2], sin[:, : HEAD // 2]).transpose(1, 2)
        ),
    )
    moved = 2 * size(x) + 2 * size(cos)
    return Problem(define, [x], [cos, sin], (moved, moved), rivals)


def cross_entropy(width: int, elements: int, new: Callable) -> Problem:
    logits = new(elements // width, width)
    target = torch.randint(width, (logits.shape[0],)).to(logits.device)
    rivals = present(
        liger=LIGER_LOSS
        and (lambda logits, target: LIGER_LOSS.apply(logits.clone(), target, None, -100, 0.0, 0.0, "mean")[0]),
        quack=QUACK_LOSS and (lambda logits, target: QUACK_LOSS(logits, target)),
    )
    return Problem(
        lambda logits, target: F.cross_entropy(logits.float(), target),
        [logits],
        [target],
        (size(logits), 2 * size(logits)),
        rivals,
    )


def size(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


# ---------------------------------------------------------------- the meter


class Meter:
    """Seconds of one call on ``device``."""

    def __init__(self, device: str, elements: int):
        self.cuda = device == "cuda"
        self.source = torch.empty(4 * elements, dtype=torch.bfloat16, device=device)
        self.sink = torch.empty_like(self.source)

    def __call__(self, call: Callable[[], Any]) -> tuple[float, Any]:
        if not self.cuda:
            start = time.perf_counter()
            result = call()
            return time.perf_counter() - start, result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.sink.copy_(self.source)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result

    def copy_bandwidth(self) -> float:
        """Bytes per second of a copy, read and written."""
        times = [self(lambda: self.sink.copy_(self.source))[0] for _ in range(20)]
        return 2 * size(self.source) / statistics.median(times)


def rivals_of(problem: Problem, device: str) -> dict[str, Callable]:
    """Every rival's forward, ours first; each works on leaves of its own."""
    options = {"target": "cuda"} if device == "cpu" else None
    results = {
        OURS: torch.compile(problem.define, backend="mindspeed", dynamic=False, options=options),
        "inductor": torch.compile(problem.define, dynamic=False),
    }
    if device == "cuda":
        results["multi_kernel"] = torch.compile(problem.define, dynamic=False, options={"triton.multi_kernel": 1})
    return results | problem.rivals


def measure(name: str, problem: Problem, meter: Meter, device: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds (forward, backward) by rival; a rival that fails or is wrong is reported and left out."""
    exact = [t.double().requires_grad_() for t in problem.leaves]
    out = problem.define(*exact, *(t.double() if t.is_floating_point() else t for t in problem.others))
    grad = torch.randn_like(out).to(torch.bfloat16)
    want = [out.detach(), *torch.autograd.grad(out, exact, grad.to(out.dtype))]
    del exact, out
    ready: dict[str, Callable[[], tuple[float, float, list[torch.Tensor]]]] = {}
    for rival, forward in rivals_of(problem, device).items():
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in problem.leaves]

        def step(forward=forward, leaves=leaves) -> tuple[float, float, list[torch.Tensor]]:
            fwd, out = meter(lambda: forward(*leaves, *problem.others))
            cotangent = grad.to(out.dtype)
            bwd, grads = meter(lambda: torch.autograd.grad(out, leaves, cotangent))
            return fwd, bwd, [out.detach(), *grads]

        try:
            with recorder.collecting() as records:
                have = step()[2]
            kernels = {row["kernel"] for record in records for row in record.lowered}
            if rival == OURS and not (kernels and all(k.startswith("triton, ") for k in kernels)):
                raise RuntimeError(f"other kernels were chosen: {kernels}")
            error = max(((h.double() - w).norm() / w.norm()).item() for h, w in zip(have, want, strict=True))
            del have
            if not error < 1e-2:
                raise RuntimeError(f"wrong by {error:.1e}")
            step()
        except Exception as e:  # a rival's limits are not ours: say so and go on
            if rival == OURS:
                raise
            print(f"# {name}: {rival} left out: {type(e).__name__}: {str(e).splitlines()[0][:120] if str(e) else ''}")
            continue
        ready[rival] = step
    times: dict[str, list[tuple[float, float]]] = {rival: [] for rival in ready}
    for _ in range(rounds):
        for rival, step in ready.items():
            times[rival].append(step()[:2])
    return {rival: tuple(statistics.median(column) for column in zip(*seconds)) for rival, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--elements", type=int, default=2**28, help="of the largest input of every problem")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    meter = Meter(args.device, args.elements)
    copy = meter.copy_bandwidth()
    common.header(
        f"kernels on {torch.cuda.get_device_name() if args.device == 'cuda' else 'the interpreter: no times'}, copy "
        f"{copy / 1e9:.0f} GB/s"
    )
    ratios: dict[tuple[str, str], list[float]] = {}
    for make in (rms_norm, swiglu, rope, cross_entropy):
        print(
            f"\n{make.__name__:<14}{'width':>7}  "
            f"{'rival':<13}{'fwd GB/s':>9}{'%':>5}{'bwd GB/s':>10}{'%':>5}{'both ms':>9}{'ours/rival':>11}"
        )
        for width in WIDTHS:
            torch._dynamo.reset()
            problem = make(
                width, args.elements, lambda *shape: torch.randn(*shape, device=args.device).to(torch.bfloat16)
            )
            times = measure(f"{make.__name__} {width}", problem, meter, args.device, args.rounds)
            for rival, (fwd, bwd) in times.items():
                ratio = sum(times[OURS]) / (fwd + bwd)
                ratios.setdefault((make.__name__, rival), []).append(ratio)
                rates = [b / t for b, t in zip(problem.moved, (fwd, bwd))]
                shown = "".join(f"{r / 1e9:>{w}.0f}{100 * r / copy:>5.0f}" for r, w in zip(rates, (9, 10)))
                print(f"{'':<14}{width:>7}  {rival:<13}{shown}{(fwd + bwd) * 1e3:>9.3f}{ratio:>11.3f}", flush=True)
    print("\ngeometric mean of ours/rival, both directions; widths")
    for (operator, rival), values in ratios.items():
        if rival != OURS:
            print(f"{operator:<16}{rival:<13}{math.exp(statistics.fmean(map(math.log, values))):>7.3f}{len(values):>4}")


LIGER_NORM = optional("liger", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
LIGER_SWIGLU = optional("liger", "liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
LIGER_ROPE = optional("liger", "liger_kernel.ops.rope", "LigerRopeFunction")
LIGER_LOSS = optional("liger", "liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction")
QUACK_NORM = optional("quack", "quack", "rmsnorm")
QUACK_ROPE = optional("quack", "quack.rotary", "apply_rotary_emb")
QUACK_LOSS = optional("quack", "quack", "cross_entropy")

if __name__ == "__main__":
    main()
