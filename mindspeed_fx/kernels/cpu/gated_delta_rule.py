"""The gated delta rule on CPU, a tile of 64 tokens at a time, from C++ of our own.

As products of ATen its batched products of 64 by 128 run at 100 GFLOP/s and half of the time goes to passes over what
stands between them. Here they are oneDNN's small products, nothing of a tile leaves the second-level cache, triangular
systems are solved by substitution, and the heads that share a key share its products. Work buffers take 0.3 MiB a
thread forward and 1.8 MiB backward where heads are 128 wide and chunks 64.
Measured by benchmarks/gated_delta_rule.py.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import gated_delta_rule as definition
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.cpu.attention_flash import TYPES, is_empty
from mindspeed_fx.kernels.gated_delta_rule_chunks import SPAN
from mindspeed_fx.kernels.recurrence import check_shapes


class _Sequence(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("type", "batch", "head", "row"))]


class _Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in "batch heads key_heads seq k_dim v_dim span threads".split()),
        *((name, ctypes.c_int64) for name in ("together", "gated", "normalized")),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("state", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        *((name, _Sequence) for name in "q k v out dq dk dv g beta dg dbeta".split()),
    ]


def problem(*tensors: Tensor | None) -> str | None:
    """Why the kernels cannot run on these, real or fake; None when they can. Begins to build them when they can."""
    for x in tensors:
        if x is not None and (x.dtype not in TYPES or x.device.type != "cpu"):
            return f"{x.dtype} on {x.device.type}; float32, bfloat16 and float16 on cpu only"
    if reason := cpp.problem():
        return reason
    cpp.start()
    return None


@operator(f"delta_tiles({definition.SCHEMA}) -> (Tensor, Tensor, Tensor)", definition.fake, opaque=True)
def delta_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
    chunk: int = definition.CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::gated_delta_rule``, whose reference runs where the kernel cannot; arguments and results as there.

    Tensors are float32, bfloat16 or float16 on cpu, each of its own type. ``chunk`` says where states are kept for the
    backward; tiles have 64 tokens whatever it is.
    """
    tensors = (q, k, v, g, beta, state)
    if problem(*tensors) or is_empty(q, v) or chunk < 1 or cpp.function("delta_rule_forward") is None:
        return definition.gated_delta_rule.reference(*tensors, scale, norm_eps, chunk)
    definition.check(*tensors, chunk)
    out, final, starts = definition.fake(*tensors, scale, norm_eps, chunk)
    final.zero_() if state is None else final.copy_(state)
    sequences = {"q": q, "k": k, "v": v, "out": out, "g": g, "beta": beta}
    call_kernel("delta_rule_forward", sequences, final, starts, scale, norm_eps, chunk)
    return out, final, starts


@operator(
    f"delta_tiles_backward(Tensor grad, Tensor? grad_state, Tensor starts, {definition.SCHEMA}) -> (Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor)",
    definition.fake_backward,
    opaque=True,
)
def delta_tiles_backward(
    grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None, chunk=definition.CHUNK
):
    """``mindspeed::gated_delta_rule_backward``, whose reference runs where the kernel cannot; arguments and results as
    there.
    """
    arguments = (grad, grad_state, starts, q, k, v, g, beta, state)
    if problem(*arguments) or is_empty(q, v) or chunk < 1 or cpp.function("delta_rule_backward") is None:
        return definition.gated_delta_rule_backward.reference(*arguments, scale, norm_eps, chunk)
    definition.check(*arguments[3:], chunk)
    states = definition.fake(*arguments[3:], scale, norm_eps, chunk)[1:]
    wanted = {"grad": (grad, v.shape), "grad_state": (grad_state, states[0].shape), "starts": (starts, states[1].shape)}
    check_shapes("gated_delta_rule_backward", wanted)
    results = definition.fake_backward(*arguments, scale, norm_eps, chunk)
    dq, dk, dv, dg, dbeta, dstate = results
    dfinal = torch.zeros_like(starts[:, :, 0]) if grad_state is None else grad_state.to(starts.dtype, copy=True)
    dfinal = dfinal.contiguous()
    # Heads that share a key and run apart have gradients of it each, in float32, summed after.
    is_split = _heads_together(q, v) * q.shape[1] < v.shape[1]
    of_keys = [q.new_empty(*v.shape[:3], q.shape[3], dtype=torch.float32) if is_split else x for x in (dq, dk)]
    of_gates = [torch.empty_like(x, dtype=torch.float32) for x in (dg, dbeta)]
    sequences = {"q": q, "k": k, "v": v, "out": grad, "g": g, "beta": beta, "dv": dv}
    sequences |= dict(zip(("dq", "dk", "dg", "dbeta"), (*of_keys, *of_gates)))
    call_kernel("delta_rule_backward", sequences, dfinal, starts.contiguous(), scale, norm_eps, chunk)
    for x, wide in zip((dq, dk), of_keys):
        if is_split:
            x.copy_(wide.unflatten(1, (x.shape[1], -1)).sum(2))
    for x, wide in zip((dg, dbeta, dstate), (*of_gates, dfinal)):
        x.copy_(wide)
    return results


def _heads_together(q: Tensor, v: Tensor) -> int:
    """Heads that a thread takes at a time: all that share a key, or one where threads would be left without."""
    return v.shape[1] // q.shape[1] if q.shape[0] * q.shape[1] >= torch.get_num_threads() else 1


def call_kernel(
    kernel: str,
    sequences: dict[str, Tensor | None],
    state: Tensor,
    starts: Tensor,
    scale: float,
    eps: float | None,
    chunk: int,
) -> None:
    q, v, g = (sequences[name] for name in ("q", "v", "g"))
    sizes = (*v.shape[:2], q.shape[1], q.shape[2], q.shape[3], v.shape[3], SPAN * chunk, torch.get_num_threads())
    settings = (_heads_together(q, v), g is not None, eps is not None, scale, eps or 0.0)
    data = _Rule(*sizes, *settings, state.data_ptr(), starts.data_ptr())
    kept = []  # copies live until the kernel ends
    for name, x in sequences.items():
        if x is not None and x.numel():  # without g its gradient is empty
            x = x.float() if x.dim() == 3 else _rows(x)
            kept.append(x)
            setattr(data, name, _Sequence(x.data_ptr(), TYPES.index(x.dtype), *x.stride()[:3]))
    cpp.call(kernel, ctypes.byref(data))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


delta_tiles.shard(definition.strategies)
delta_tiles.costs(definition.cost)
delta_tiles_backward.shard(definition.strategies_backward)
delta_tiles_backward.costs(definition.backward_cost)


@definition.gated_delta_rule.lower("cpu")("tiles of 64 tokens", lambda *args: problem(*args[:6]))
def _forward(*args):
    return delta_tiles.overload(*args)


@definition.gated_delta_rule_backward.lower("cpu")("tiles of 64 tokens", lambda *args: problem(*args[:9]))
def _backward(*args):
    return delta_tiles_backward.overload(*args)
