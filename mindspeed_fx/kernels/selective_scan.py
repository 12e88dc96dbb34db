"""Mamba's selective scan, some tokens at a time: a diagonal recurrence whose steps, inputs and outputs are the tokens'.

Per channel, with a state h [n] that starts at ``state`` and, token by token, with delta = softplus(dt + bias) or dt,

    h <- e^(delta A) h + delta B u;  y = C . h + D u;  out = y silu(z)

Decays differ from element to element of the state, so that no product of matrices stands for the recurrence: decays and
inputs are made for a chunk of tokens at once, the line of states goes over it token by token, and nothing [seq, n,
channels] is made. The gradient goes backward over the same chunks, whose states it makes again. Source: Gu and Dao
2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752), section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.recurrence import check_shapes, computed_in, register_gradient

CHUNK = 32
"""Tokens that are computed together: two values for each element of the state and token; half the size of u in states
that are kept for the backward where these are 16 wide (benchmarks/selective_scan.py)."""

SCHEMA = (
    "Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? bias, Tensor? state, "
    "bool softplus"
)


def _like_bsd(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty, shaped as x [batch, channels, seq] and stored as [batch, seq, channels]."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1]), dtype=dtype or x.dtype).transpose(1, 2)


def fake(u, dt, A, B, C, D, z, bias, state, softplus):
    wide, size = computed_in(u, dt, A, B, C, D, z, bias, state), (u.shape[1], A.shape[1])
    number = (u.shape[2] + CHUNK - 1) // CHUNK
    return (
        _like_bsd(u, wide),
        u.new_empty((u.shape[0], *size), dtype=wide),
        u.new_empty((u.shape[0], number, *reversed(size)), dtype=wide),
    )


@operator(f"selective_scan({SCHEMA}) -> (Tensor, Tensor, Tensor)", fake, opaque=True)
def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The selective scan over a sequence; the formula stands at the top of this file.

    Args:
        u, dt: [batch, channels, seq], float.
        A: [channels, n], negative where the state is to forget.
        B, C: [batch, n, seq].
        D: [channels], the skip; None: none.
        z: [batch, channels, seq], the gate; None: none.
        bias: [channels], added to dt; None: nothing.
        state: [batch, channels, n] at the start; None: zeros.
        softplus: whether the step is softplus(dt + bias), of torch's threshold 20, or dt + bias itself.

    Returns:
        out [batch, channels, seq], stored as [batch, seq, channels], and the state at the end [batch, channels, n], in
        float32 (float64 where an argument is); of that type, too, for the gradient, the states before each chunk of
        tokens [batch, chunks, n, channels].

    Raises:
        ValueError: shapes that do not fit.
    """
    check(u, dt, A, B, C, D, z, bias, state)
    out, final, starts = fake(u, dt, A, B, C, D, z, bias, state, softplus)
    now = _first_state(final, state)
    for i, tokens in enumerate(_chunks(u.shape[2])):
        starts[:, i] = now
        here = _Chunk(tokens, u, dt, A, B, C, bias, softplus, final.dtype)
        states = here.states(now)
        now = states[-1]
        y = here.read(states, D)
        if z is not None:
            y *= F.silu(_rows(z, tokens, final.dtype))
        _put(out, tokens, y)
    final.copy_(now.transpose(1, 2))
    return out, final, starts


def _chunks(seq: int) -> list[slice]:
    return [slice(low, min(low + CHUNK, seq)) for low in range(0, seq, CHUNK)]


def _rows(x: Tensor, tokens: slice, wide: torch.dtype) -> Tensor:
    """Some tokens of x [batch, width, seq], as [tokens, batch, width]."""
    return x[:, :, tokens].permute(2, 0, 1).to(wide).contiguous()


def _put(into: Tensor, tokens: slice, x: Tensor) -> None:
    """Write x [tokens, batch, width] to ``into`` [batch, width, seq]."""
    into[:, :, tokens] = x.permute(1, 2, 0)


def _first_state(final: Tensor, state: Tensor | None) -> Tensor:
    """The state at the start as [batch, n, channels]."""
    start = final.new_zeros(()).expand(final.shape) if state is None else state.to(final.dtype)
    return start.transpose(1, 2).contiguous()


class _Chunk:
    """Some tokens: u, step, B and C of each, and the decays of the state [tokens, batch, n, channels]."""

    def __init__(self, tokens, u, dt, a, b, c, bias, softplus, wide):
        self.u, self.raw = _rows(u, tokens, wide), _rows(dt, tokens, wide)
        if bias is not None:
            self.raw = self.raw + bias.to(wide)  # not in place: rows may be the argument itself
        self.softplus = softplus
        self.step = F.softplus(self.raw) if softplus else self.raw
        self.b, self.c = _rows(b, tokens, wide), _rows(c, tokens, wide)
        self.a = a.to(wide).t().contiguous()
        self.decay = (self.step.unsqueeze(2) * self.a).exp_()

    def states(self, start: Tensor) -> Tensor:
        """The state after each token."""
        states = (self.step * self.u).unsqueeze(2) * self.b.unsqueeze(3)
        for decay, now in zip(self.decay.unbind(), states.unbind()):
            start = now.addcmul_(decay, start)
        return states

    def read(self, states: Tensor, d: Tensor | None) -> Tensor:
        """y [tokens, batch, channels]"""
        y = torch.matmul(self.c.unsqueeze(2), states).squeeze(2)
        return y if d is None else y.addcmul_(self.u, d.to(y.dtype))

    def gradients(self, dy: Tensor, states: Tensor, start: Tensor, dnow: Tensor) -> tuple[Tensor, ...]:
        """Gradients of u (but for the skip), of dt, A [n, channels], B, C, and of the state before; ``dnow`` is that of
        the state after. With G_t = C_t dy_t + e^(delta A)_(t+1) G_(t+1), the gradient of each state, that of delta A is
        G h_(t-1) e^(delta A)."""
        dc = torch.matmul(states, dy.unsqueeze(3)).squeeze(3)
        dstates = self.c.unsqueeze(3) * dy.unsqueeze(2)
        each, decays = dstates.unbind(), self.decay.unbind()
        each[-1].add_(dnow)
        for t in range(len(each) - 1, 0, -1):
            each[t - 1].addcmul_(decays[t], each[t])
        dnow = decays[0] * each[0]
        db = torch.matmul(dstates, (self.step * self.u).unsqueeze(3)).squeeze(3)
        dproduct = torch.matmul(self.b.unsqueeze(2), dstates).squeeze(2)
        exponents = dstates.mul_(self.decay)
        exponents[1:] *= states[:-1]
        exponents[0] *= start
        da = torch.mul(exponents, self.step.unsqueeze(2), out=states).sum((0, 1))
        dstep = exponents.mul_(self.a).sum(2).addcmul_(dproduct, self.u)
        if self.softplus:
            dstep *= torch.where(self.raw > 20, 1.0, self.raw.sigmoid())
        return dproduct.mul_(self.step), dstep, da, db, dc, dnow


def fake_backward(grad, grad_state, starts, u, dt, A, B, C, D, z, bias, state, softplus):
    empty = u.new_empty(0)
    dstate = starts.new_empty((u.shape[0], *A.shape), dtype=starts.dtype if state is None else state.dtype)
    return (
        _like_bsd(u),
        _like_bsd(dt),
        A.new_empty(A.shape),
        _like_bsd(B),
        _like_bsd(C),
        empty if D is None else D.new_empty(D.shape),
        u.new_empty(0) if z is None else _like_bsd(z),
        u.new_empty(0) if bias is None else bias.new_empty(bias.shape),
        dstate,
    )


@operator(
    f"selective_scan_backward(Tensor grad, Tensor? grad_state, Tensor starts, {SCHEMA}) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_backward,
    opaque=True,
)
def selective_scan_backward(grad, grad_state, starts, u, dt, A, B, C, D, z, bias, state, softplus):
    """Gradients of u, dt, A, B, C, D, z, bias (empty where there is none) and the state at the start, each as its
    argument; those with a sequence stored as [batch, seq, ...]. ``grad`` is that of the result, ``grad_state`` that of
    the last state."""
    check(u, dt, A, B, C, D, z, bias, state)
    results = fake_backward(grad, grad_state, starts, u, dt, A, B, C, D, z, bias, state, softplus)
    du, ddt, dA, dB, dC, dD, dz, dbias, dstate = results
    wide, chunks = starts.dtype, _chunks(u.shape[2])
    total, skip, shift = (starts.new_zeros(shape) for shape in (A.t().shape, A.shape[:1], A.shape[:1]))
    dnow = _first_state(starts.new_empty((u.shape[0], *A.shape)), grad_state)
    for i in reversed(range(len(chunks))):
        tokens, start = chunks[i], starts[:, i]
        here = _Chunk(tokens, u, dt, A, B, C, bias, softplus, wide)
        states, dy = here.states(start), _rows(grad, tokens, wide)
        if z is not None:
            gate = _rows(z, tokens, wide)
            half = gate.sigmoid()
            _put(dz, tokens, here.read(states, D).mul_(dy).mul_(half * (1 + gate * (1 - half))))
            dy = dy * half.mul_(gate)
        drow, dstep, da, db, dc, dnow = here.gradients(dy, states, start, dnow)
        if D is not None:
            skip += (dy * here.u).sum((0, 1))
            drow.addcmul_(dy, D.to(wide))
        shift += dstep.sum((0, 1))
        total += da
        for into, part in ((du, drow), (ddt, dstep), (dB, db), (dC, dc)):
            _put(into, tokens, part)
    dstate.copy_(dnow.transpose(1, 2))
    dA.copy_(total.t())
    for x, into, part in ((D, dD, skip), (bias, dbias, shift)):
        if x is not None:
            into.copy_(part)
    return results


def check(u, dt, A, B, C, D, z, bias, state):
    torch._check_value(
        u.dim() == 3 and A.dim() == 2,
        lambda: f"selective_scan: u is {list(u.shape)} and A {list(A.shape)}; valid: three and two dimensions",
    )
    batch, channels, seq = u.shape
    n = A.shape[1]
    wanted = {
        "dt": (dt, (batch, channels, seq)),
        "A": (A, (channels, n)),
        "B": (B, (batch, n, seq)),
        "C": (C, (batch, n, seq)),
        "D": (D, (channels,)),
        "z": (z, (batch, channels, seq)),
        "bias": (bias, (channels,)),
        "state": (state, (batch, channels, n)),
    }
    check_shapes("selective_scan", wanted)


# --------------------------------------------------------------------------- gradient, placements, cost


register_gradient("selective_scan", 9)


def _strategies(D):
    """(the result, u and its like, their gradients, the state, states of chunks, A, its gradient, what else channels
    have, its gradient, B and C, their gradients): by batch; by channels; without a skip by the width of the state. A
    sequence stays whole."""
    yield 0, 0, 0, 0, 0, REPLICATED, PARTIAL, REPLICATED, PARTIAL, 0, 0
    yield 1, 1, 1, 1, 3, 0, 0, 0, 0, REPLICATED, PARTIAL
    if D is None:
        yield PARTIAL, REPLICATED, PARTIAL, 2, 2, 1, 1, REPLICATED, PARTIAL, 1, 1


@selective_scan.shard
def _sharding_rule(u, dt, A, B, C, D, z, bias, state, softplus):
    return [
        ([out, final, states], [rows, rows, rates, shared, shared, own, rows, own, final])
        for out, rows, _, final, states, rates, _, own, _, shared, _ in _strategies(D)
    ]


@selective_scan_backward.shard
def _sharding_rule_backward(grad, grad_state, starts, u, dt, A, B, C, D, z, bias, state, softplus):
    def of(y, placement):
        return REPLICATED if y is None else placement

    return [
        (
            [drows, drows, drates, dshared, dshared, of(D, down), of(z, drows), of(bias, down), final],
            [REPLICATED if out == PARTIAL else out, final, states, rows, rows, rates, shared, shared, own, rows, own]
            + [final],
        )
        for out, rows, drows, final, states, rates, drates, own, down, shared, dshared in _strategies(D)
    ]


@selective_scan.costs
def _cost(out, u, dt, A, B, C, D, z, bias, state, softplus):
    """For each element of the state a decay, an update and the product with C."""
    elements = u.numel * A.shape[1]
    tensors = (u, dt, A, B, C, D, z, bias, state)
    return once(out, *tensors, flops=2 * elements, vector=elements * (SPECIAL + 5), dtype="float32")


@selective_scan_backward.costs
def _backward_cost(out, grad, grad_state, starts, u, dt, A, B, C, D, z, bias, state, softplus):
    """The states again, and with a gate what was read of them; gradients of B, C and of what is added to a state."""
    elements = u.numel * A.shape[1]
    again = 0 if z is None else 2 * elements
    tensors = (grad, grad_state, starts, u, dt, A, B, C, D, z, bias, state)
    vector = elements * (SPECIAL + 16)
    return once(out, *tensors, flops=again + 6 * elements, vector=vector, dtype="float32", again=again)


# --------------------------------------------------------------------------- Triton


def _refuse(u, dt, A, B, C, D, z, bias, state, softplus):
    if not all(isinstance(n, int) for n in A.shape):
        return "channels or the width of the state are symbolic"
    if not 0 < A.shape[1] <= 32:
        return f"states {A.shape[1]} wide, the kernel takes up to 32"
    return triton.refuse_types(A.shape[0], u=u, dt=dt, A=A, B=B, C=C, D=D, z=z, bias=bias, state=state)


triton.kernel(
    selective_scan, fake, "selective_scan.forward", "walks through segments with the states of some channels", _refuse
)
triton.kernel(
    selective_scan_backward,
    fake_backward,
    "selective_scan_backward.backward",
    "a walk back, the states of a chunk again",
    lambda grad, grad_state, starts, *args: _refuse(*args) or triton.refuse_types(1, grad=grad, grad_state=grad_state),
)
triton.on_npu(selective_scan)
triton.on_npu(selective_scan_backward)
