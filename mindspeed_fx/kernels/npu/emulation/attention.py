"""CPU kernels of the fusion attention of torch_npu, versions 1 and 3: operators, shapes, gradients.

What they compute: :mod:`mindspeed_fx.kernels.npu.emulation.attention_math`.
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.attention_math import attention, attention_grad
from mindspeed_fx.kernels.npu.emulation.registry import emulation

FULL = 2147483647
"""Window without an end."""


def _shapes(query, key, value, heads, layout):
    if layout in ("BSH", "SBH"):
        dim = query.shape[2] // heads
        shape = (*query.shape[:2], heads * (value.shape[2] // (key.shape[2] // dim)))
        b, s = query.shape[:2] if layout == "BSH" else query.shape[1::-1]
    else:
        shape = (*query.shape[:-1], value.shape[-1])
        b, s = query.shape[0], query.shape[2 if layout == "BNSD" else 1]
    return shape, (*query.shape[:2], 8) if layout == "TND" else (b, heads, s, 8)


def _fake(query, key, value, head_num, input_layout):
    shape, stats = _shapes(query, key, value, head_num, input_layout)
    return query.new_empty(shape), *(query.new_empty(stats, dtype=torch.float32) for _ in range(2)), query.new_empty(0)


def _fake_v3(query, key, value, head_num, input_layout, *args, **kwargs):
    return *_fake(query, key, value, head_num, input_layout), *(query.new_empty(1, dtype=torch.int64) for _ in range(2))


def _fake_grad(query, key, value, dy, head_num, input_layout, *, sink=None, **kwargs):
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        query.new_empty(0),
        query.new_empty((), dtype=torch.float32) if sink is None else sink.new_empty(sink.shape),
    )


def _draw(keep_prob):
    return int(torch.randint(2**31, ())) if keep_prob != 1.0 else 0


NAMES = (
    "pse",
    "padding_mask",
    "atten_mask",
    "scale",
    "keep_prob",
    "pre_tockens",
    "next_tockens",
    "inner_precise",
    "prefix",
    "actual_seq_qlen",
    "actual_seq_kvlen",
    "sparse_mode",
    "gen_mask_parallel",
    "sync",
    "softmax_layout",
    "sink",
)


def _setup(version):
    def setup(ctx, inputs, output):
        query, key, value, ctx.heads, ctx.layout = inputs[:5]
        ctx.settings = dict(zip(NAMES, inputs[5 : 5 + len(NAMES)]))
        tensors = {n: x for n, x in ctx.settings.items() if isinstance(x, torch.Tensor)}
        ctx.names = list(tensors)
        ctx.draw = None if version == 3 else output[4:7]
        ctx.save_for_backward(query, key, value, *output[:3], *(output[4:6] if version == 3 else ()), *tensors.values())

    return setup


def _gradient(version):
    def backward(ctx, grad, *_):
        query, key, value, out, top, total, *rest = ctx.saved_tensors
        draw, rest = (rest[:2], rest[2:]) if version == 3 else (ctx.draw, rest)
        arguments = {**ctx.settings, **dict(zip(ctx.names, rest))}
        arguments["scale_value"] = arguments.pop("scale")
        op = torch.ops.npu.npu_fusion_attention_grad_v3 if version == 3 else torch.ops.npu.npu_fusion_attention_grad
        extra = {} if version == 3 else {"numels": draw[2]}
        dq, dk, dv, _, dsink = op(
            query,
            key,
            value,
            grad,
            ctx.heads,
            ctx.layout,
            softmax_max=top,
            softmax_sum=total,
            attention_in=out,
            seed=draw[0],
            offset=draw[1],
            **extra,
            **arguments,
        )
        grads = [None] * (21 if version == 3 else 24)
        grads[:3] = dq, dk, dv
        grads[20] = None if arguments["sink"] is None else dsink
        return tuple(grads)

    return backward


@emulation("npu_fusion_attention_v3", _fake_v3, _setup(3), _gradient(3))
def npu_fusion_attention_v3(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=FULL,
    next_tockens=FULL,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
):
    """(out, softmax_max, softmax_sum, reserved, seed [1], offset [1])."""
    seed = _draw(keep_prob)
    out, top, total = attention(
        query,
        key,
        value,
        head_num,
        input_layout,
        pse,
        atten_mask,
        scale,
        keep_prob,
        pre_tockens,
        next_tockens,
        inner_precise,
        actual_seq_qlen,
        actual_seq_kvlen,
        sparse_mode,
        softmax_layout,
        sink,
        seed,
        0,
    )
    return out, top, total, query.new_empty(0), torch.tensor([seed]), torch.tensor([0])


@emulation("npu_fusion_attention_grad_v3", _fake_grad)
def npu_fusion_attention_grad_v3(
    query,
    key,
    value,
    dy,
    head_num,
    input_layout,
    *,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    softmax_max=None,
    softmax_sum=None,
    softmax_in=None,
    attention_in=None,
    scale_value=1.0,
    keep_prob=1.0,
    pre_tockens=FULL,
    next_tockens=FULL,
    inner_precise=0,
    seed=None,
    offset=None,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
):
    """(dq, dk, dv, dpse of size 0, dsink)."""
    assert softmax_max.is_contiguous() and softmax_sum.is_contiguous(), "as npu_fusion_attention_v3 returns them"
    seed, offset = (0 if x is None else int(x) for x in (seed, offset))
    *grads, dsink = attention_grad(
        query,
        key,
        value,
        dy,
        attention_in,
        (softmax_max, softmax_sum),
        head_num,
        input_layout,
        pse,
        atten_mask,
        scale_value,
        keep_prob,
        pre_tockens,
        next_tockens,
        inner_precise,
        actual_seq_qlen,
        actual_seq_kvlen,
        sparse_mode,
        softmax_layout,
        sink,
        seed,
        offset,
    )
    return *grads, query.new_empty(0), query.new_empty((), dtype=torch.float32) if dsink is None else dsink


@emulation("npu_fusion_attention", lambda *args, **kwargs: (*_fake(*args[:5]), 0, 0, 0), _setup(1), _gradient(1))
def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=FULL,
    next_tockens=FULL,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
    dropout_mask=None,
    seed=0,
    offset=0,
):
    """(out, softmax_max, softmax_sum, reserved, seed, offset, numels), the last three integers."""
    seed = _draw(keep_prob)
    out, top, total = attention(
        query,
        key,
        value,
        head_num,
        input_layout,
        pse,
        atten_mask,
        scale,
        keep_prob,
        pre_tockens,
        next_tockens,
        inner_precise,
        actual_seq_qlen,
        actual_seq_kvlen,
        sparse_mode,
        softmax_layout,
        sink,
        seed,
        0,
    )
    return out, top, total, query.new_empty(0), seed, 0, 0


@emulation("npu_fusion_attention_grad", _fake_grad)
def npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, *, seed=0, offset=0, numels=0, **args):
    """(dq, dk, dv, dpse of size 0, dsink)."""
    return npu_fusion_attention_grad_v3(query, key, value, dy, head_num, input_layout, seed=seed, offset=offset, **args)
