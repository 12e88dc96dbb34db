"""Kimi Delta Attention on CPU, a tile of 64 tokens at a time, from C++ of our own: as gated_delta_rule.py in this
folder, with a gate for every channel of the keys.

As products of ATen each level of pairs within a chunk is a pass over keys and decays, and the smallest levels are
products of a few numbers. Here pairs within 16 tokens are taken one by one, and nothing of a tile leaves the
second-level cache. Work buffers take 0.5 MiB a thread forward and 1.2 MiB backward where heads are 128 wide.
Measured by benchmarks/kimi_delta_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import kimi_delta_attention as definition
from mindspeed_fx.kernels.base import operator
from mindspeed_fx.kernels.cpu.attention_flash import is_empty
from mindspeed_fx.kernels.cpu.gated_delta_rule import call_kernel, problem
from mindspeed_fx.kernels.kimi_delta_attention_chunks import CHUNK
from mindspeed_fx.kernels.recurrence import check_shapes


@operator(f"kimi_delta_tiles({definition.SCHEMA}) -> (Tensor, Tensor, Tensor)", definition.fake, opaque=True)
def kimi_delta_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::kimi_delta_attention``, whose reference runs where the kernel cannot; arguments and results as
    there.

    Tensors are float32, bfloat16 or float16 on cpu, each of its own type.
    """
    tensors = (q, k, v, g, beta, state)
    if problem(*tensors) or is_empty(q, v) or cpp.function("kimi_delta_forward") is None:
        return definition.kimi_delta_attention.reference(*tensors, scale, norm_eps)
    definition.check(*tensors)
    out, final, starts = definition.fake(*tensors, scale, norm_eps)
    final.zero_() if state is None else final.copy_(state)
    sequences = {"q": q, "k": k, "v": v, "out": out, "g": g, "beta": beta}
    call_kernel("kimi_delta_forward", sequences, final, starts, scale, norm_eps, CHUNK)
    return out, final, starts


@operator(
    f"kimi_delta_tiles_backward(Tensor grad, Tensor? grad_state, Tensor starts, {definition.SCHEMA}) -> (Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
    definition.fake_backward,
    opaque=True,
)
def kimi_delta_tiles_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps=None):
    """``mindspeed::kimi_delta_attention_backward``, whose reference runs where the kernel cannot; arguments and results
    as there.
    """
    arguments = (grad, grad_state, starts, q, k, v, g, beta, state)
    if problem(*arguments) or is_empty(q, v) or cpp.function("kimi_delta_backward") is None:
        return definition.kimi_delta_attention_backward.reference(*arguments, scale, norm_eps)
    definition.check(*arguments[3:])
    states = definition.fake(*arguments[3:], scale, norm_eps)[1:]
    wanted = {"grad": (grad, v.shape), "grad_state": (grad_state, states[0].shape), "starts": (starts, states[1].shape)}
    check_shapes("kimi_delta_attention_backward", wanted)
    results = definition.fake_backward(*arguments, scale, norm_eps)
    dq, dk, dv, dg, dbeta, dstate = results
    dfinal = torch.zeros_like(starts[:, :, 0]) if grad_state is None else grad_state.to(starts.dtype, copy=True)
    dfinal = dfinal.contiguous()
    wide_dbeta = torch.empty_like(dbeta, dtype=torch.float32)
    sequences = {"q": q, "k": k, "v": v, "out": grad, "g": g, "beta": beta}
    sequences |= {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": wide_dbeta}
    call_kernel("kimi_delta_backward", sequences, dfinal, starts.contiguous(), scale, norm_eps, CHUNK)
    dbeta.copy_(wide_dbeta)
    dstate.copy_(dfinal)
    return results


kimi_delta_tiles.shard(definition.strategies)
kimi_delta_tiles.costs(definition.cost)
kimi_delta_tiles_backward.shard(definition.strategies_backward)
kimi_delta_tiles_backward.costs(definition.backward_cost)


@definition.kimi_delta_attention.lower("cpu")("tiles of 64 tokens", lambda *args: problem(*args[:6]))
def _forward(*args):
    return kimi_delta_tiles.overload(*args)


@definition.kimi_delta_attention_backward.lower("cpu")("tiles of 64 tokens", lambda *args: problem(*args[:9]))
def _backward(*args):
    return kimi_delta_tiles_backward.overload(*args)
