"""Mamba-2's state space dual, chunk by chunk: linear attention whose state forgets at a rate for each head and token.

Per head, with a state S [p, n] that starts at ``state`` and, token by token,

    S <- e^(dt A) S + dt x B^T;  out = S C + D x

Within a chunk, with c = cumsum(dt A), X = dt x, M_ij = e^(c_i - c_j) C_i . B_j for i >= j and K = e^(c_last - c):

    out = M X + e^c C S^T + D x;  S <- e^(c_last) S + (K X)^T B

Nothing larger than [chunk, chunk] per head or than a state is made, and nothing for all chunks at once but the result.
Source: Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), section 6, listing 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.recurrence import check_shapes, computed_in, register_gradient
from mindspeed_fx.kernels.ssd_chunks import SPAN, Chunk, chunk_slices, head_blocks

CHUNK = 64
"""Tokens of a chunk where the caller names none (benchmarks/ssd.py)."""

SCHEMA = f"Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? state, int chunk={CHUNK}"


def fake(x, dt, A, B, C, D, state, chunk=CHUNK):
    wide, size = computed_in(x, dt, A, B, C, D, state), (*x.shape[2:], B.shape[3])
    number = (x.shape[1] + SPAN * chunk - 1) // (SPAN * chunk)
    return (
        x.new_empty(x.shape, dtype=wide),
        x.new_empty((x.shape[0], *size), dtype=wide),
        x.new_empty((x.shape[0], number, *size), dtype=wide),
    )


@operator(f"ssd({SCHEMA}) -> (Tensor, Tensor, Tensor)", fake, opaque=True)
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """The state space dual over a sequence; the formula stands at the top of this file.

    Args:
        x: [batch, seq, heads, p], float.
        dt: [batch, seq, heads], the step of each token, as it is: bias, softplus and limits are the caller's.
        A: [heads], negative where the state is to forget.
        B, C: [batch, seq, groups, n]; groups divides heads, and each serves as many heads that follow each other.
        D: [heads], the skip; None: none.
        state: [batch, heads, p, n] at the start; None: zeros.
        chunk: tokens of a chunk; the result does not depend on it but for rounding.

    Returns:
        out [batch, seq, heads, p] and the state at the end [batch, heads, p, n], in float32 (float64 where an argument
        is); of that type, too, for the gradient, the states before each span of chunks [batch, spans, heads, p, n].

    Raises:
        ValueError: shapes that do not fit, or a chunk of no tokens.
    """
    check(x, dt, A, B, C, D, state, chunk)
    out, final, starts = fake(x, dt, A, B, C, D, state, chunk)
    for heads in head_blocks(x, B):
        now = _rows_of_state(final.new_zeros(()).expand(final.shape) if state is None else state, heads, final.dtype)
        after = torch.empty_like(now)
        for i, tokens in enumerate(chunk_slices(x.shape[1], chunk)):
            if i % SPAN == 0:
                starts[heads.row, i // SPAN, heads.own] = now.view_as(starts[heads.row, 0, heads.own])
            here = Chunk(heads, tokens, x, dt, A, B, C, final.dtype)
            result = here.result(now)
            if D is not None:
                result.addcmul_(here.x, D[heads.own].to(final.dtype).unsqueeze(-1))
            out[heads.row, tokens, heads.own] = result
            now, after = here.next_state(now, after), now
        final[heads.row, heads.own] = now.view_as(final[heads.row, heads.own])
    return out, final, starts


def _rows_of_state(x: Tensor, heads, wide: torch.dtype) -> Tensor:
    """A copy of the states [batch, heads, p, n] of some heads, as [groups, heads / groups * p, n]."""
    mine = x[heads.row, heads.own]
    groups = heads.groups.stop - heads.groups.start
    return mine.to(wide, copy=True, memory_format=torch.contiguous_format).view(
        groups, mine.shape[0] // groups * mine.shape[1], mine.shape[2]
    )


def fake_backward(grad, grad_state, starts, x, dt, A, B, C, D, state, chunk=CHUNK):
    grads = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, dt, A, B, C)]
    dstate = starts.new_empty((x.shape[0], *starts.shape[2:]), dtype=starts.dtype if state is None else state.dtype)
    return *grads, x.new_empty(0) if D is None else D.new_empty(D.shape), dstate


@operator(
    f"ssd_backward(Tensor grad, Tensor? grad_state, Tensor starts, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor)",
    fake_backward,
    opaque=True,
)
def ssd_backward(grad, grad_state, starts, x, dt, A, B, C, D, state, chunk=CHUNK):
    """Gradients of x, dt, A, B, C, D (empty without D) and the state at the start, each as its argument, contiguous.
    ``grad`` is that of the result, ``grad_state`` that of the last state.

    What stands inside a chunk is computed again; the states of a span are, from the one before it, ``starts``.
    """
    check(x, dt, A, B, C, D, state, chunk)
    dx, ddt, dA, dB, dC, dD, dstate = fake_backward(grad, grad_state, starts, x, dt, A, B, C, D, state, chunk)
    wide = starts.dtype
    sum_a, sum_d = A.new_zeros(A.shape, dtype=torch.float64), A.new_zeros(A.shape, dtype=wide)
    sums = [y.new_zeros(y.shape, dtype=wide) for y in (B, C)]
    for heads in head_blocks(x, B):
        last = starts.new_zeros(()).expand(dstate.shape) if grad_state is None else grad_state
        dnow = _rows_of_state(last, heads, wide)
        chunks = chunk_slices(x.shape[1], chunk)
        for span in reversed(range(starts.shape[1])):
            mine = [Chunk(heads, t, x, dt, A, B, C, wide) for t in chunks[span * SPAN : (span + 1) * SPAN]]
            states = [_rows_of_state(starts[:, span], heads, wide)]
            for here in mine[:-1]:
                states.append(here.next_state(states[-1], torch.empty_like(dnow)))
            for i in reversed(range(len(mine))):
                tokens, here = chunks[span * SPAN + i], mine.pop()
                dout = grad[heads.row, tokens, heads.own].to(wide).contiguous()
                dsteps, dstep, da, db, dc, dnow = here.gradients(dout, states.pop(), dnow)
                if D is not None:
                    sum_d[heads.own] += (dout * here.x).sum((0, 2))
                    dsteps.addcmul_(dout, D[heads.own].to(wide).unsqueeze(-1))
                dx[heads.row, tokens, heads.own], ddt[heads.row, tokens, heads.own] = dsteps, dstep
                sum_a[heads.own] += da
                for into, part in zip(sums, (db, dc)):
                    into[heads.row, tokens, heads.groups] += part.transpose(0, 1)
        dstate[heads.row, heads.own] = dnow.view_as(dstate[heads.row, heads.own]).to(dstate.dtype)
    dA.copy_(sum_a)
    if D is not None:
        dD.copy_(sum_d)
    return dx, ddt, dA, sums[0].to(B.dtype), sums[1].to(C.dtype), dD, dstate


def check(x, dt, A, B, C, D, state, chunk):
    torch._check_value(chunk >= 1, lambda: f"ssd: chunk={chunk}; valid: a number of tokens from 1 on")
    torch._check_value(
        x.dim() == B.dim() == 4, lambda: f"ssd: x is {list(x.shape)} and B {list(B.shape)}; valid: four dimensions each"
    )
    batch, seq, heads, p = x.shape
    groups, n = B.shape[2:]
    torch._check_value(
        groups > 0 and heads % groups == 0,
        lambda: f"ssd: {groups} groups of B; valid: a divisor of {heads}, the heads of x",
    )
    wanted = {
        "dt": (dt, (batch, seq, heads)),
        "A": (A, (heads,)),
        "B": (B, (batch, seq, groups, n)),
        "C": (C, (batch, seq, groups, n)),
        "D": (D, (heads,)),
        "state": (state, (batch, heads, p, n)),
    }
    check_shapes("ssd", wanted)


# --------------------------------------------------------------------------- gradient, placements, cost


register_gradient("ssd", 7)


def _strategies(x, B, D):
    """(the result, x, its gradient, dt, its gradient, the state, states of spans, A and D, their gradients, B and C,
    their gradients): by batch; by heads, those that share B and C together; by the width of x; without a skip by that
    of the state. A sequence stays whole."""
    yield 0, 0, 0, 0, 0, 0, 0, REPLICATED, PARTIAL, 0, 0
    if B.shape[2] == 1:
        yield 2, 2, 2, 2, 2, 1, 2, 0, 0, REPLICATED, PARTIAL
    else:
        groups = 2 if B.shape[2] == x.shape[2] else Even(2)
        yield 2, 2, 2, 2, 2, 1, 2, 0, 0, groups, groups
    yield 3, 3, 3, REPLICATED, PARTIAL, 2, 3, REPLICATED, PARTIAL, REPLICATED, PARTIAL
    if D is None:
        yield PARTIAL, REPLICATED, PARTIAL, REPLICATED, PARTIAL, 3, 4, REPLICATED, PARTIAL, 3, 3


@ssd.shard
def _sharding_rule(x, dt, A, B, C, D, state, chunk=CHUNK):
    return [
        ([out, final, spans], [rows, steps, heads, groups, groups, heads, final])
        for out, rows, _, steps, _, final, spans, heads, _, groups, _ in _strategies(x, B, D)
    ]


@ssd_backward.shard
def _sharding_rule_backward(grad, grad_state, starts, x, dt, A, B, C, D, state, chunk=CHUNK):
    return [
        (
            [drows, dsteps, dheads, dgroups, dgroups, REPLICATED if D is None else dheads, final],
            [REPLICATED if out == PARTIAL else out, final, spans, rows, steps, heads, groups, groups, heads, final],
        )
        for out, rows, drows, steps, dsteps, final, spans, heads, dheads, groups, dgroups in _strategies(x, B, D)
    ]


def _work(x, B, chunk):
    """FLOP of the products [chunk, chunk] with n for all groups; with p for all heads; of a product of all tokens with
    a state; and vector FLOP of what stands inside chunks."""
    batch, seq, heads, p = x.shape
    squares = batch * (seq // chunk * chunk * chunk + (seq % chunk) ** 2)
    return (
        2 * squares * B.shape[2] * B.shape[3],
        2 * squares * heads * p,
        2 * batch * seq * heads * p * B.shape[3],
        squares * heads * (SPECIAL + 4),
    )


@ssd.costs
def _cost(out, x, dt, A, B, C, D, state, chunk=CHUNK):
    """C B^T; M X; C S^T and (K X)^T B."""
    pairs, inside, states, vector = _work(x, B, chunk)
    flops = pairs + inside + 2 * states
    return once(out, x, dt, A, B, C, D, state, flops=flops, vector=vector, dtype="float32")


@ssd_backward.costs
def _backward_cost(out, grad, grad_state, starts, x, dt, A, B, C, D, state, chunk=CHUNK):
    """C B^T and the states inside spans again; two products of [chunk, chunk] with B and C, two with rows of x, five
    of rows with a state or its gradient."""
    pairs, inside, states, vector = _work(x, B, chunk)
    chunks = (x.shape[1] + chunk - 1) // chunk
    again = pairs + 2 * (chunks - starts.shape[1]) * chunk * x.shape[0] * x.shape[2] * x.shape[3] * B.shape[3]
    new = 2 * pairs + 2 * inside + 5 * states
    tensors = (grad, grad_state, starts, x, dt, A, B, C, D, state)
    return once(out, *tensors, flops=again + new, vector=3 * vector, dtype="float32", again=again)


# --------------------------------------------------------------------------- Triton


def _refuse(x, dt, A, B, C, D, state, chunk):
    sizes = (*x.shape[2:], *B.shape[2:])
    if not all(isinstance(n, int) for n in sizes):
        return "heads, groups or their widths are symbolic"
    if B.shape[3] > 128:
        return f"states {B.shape[3]} wide, the kernel takes up to 128"
    if chunk % 4:
        return f"chunks of {chunk} tokens, the kernel takes multiples of four"
    if any(y.dtype not in triton.DTYPES[1:] for y in (x, B, C)):
        return "x, B or C is no 16-bit type"
    return triton.refuse_types(x.shape[3], x=x, dt=dt, A=A, B=B, C=C, D=D, state=state)


triton.kernel(
    ssd,
    fake,
    "ssd.forward",
    "a walk through the states of each head",
    lambda x, dt, A, B, C, D, state, chunk=CHUNK: _refuse(x, dt, A, B, C, D, state, chunk),
)
triton.kernel(
    ssd_backward,
    fake_backward,
    "ssd_backward.backward",
    "states again, a walk back, then all tiles at once",
    lambda grad, grad_state, starts, x, dt, A, B, C, D, state, chunk=CHUNK: (
        _refuse(x, dt, A, B, C, D, state, chunk) or triton.refuse_types(1, grad=grad, grad_state=grad_state)
    ),
)
triton.on_npu(ssd)
triton.on_npu(ssd_backward)
