"""Packed documents on NPU: ``npu_fusion_attention_v3`` and its backward in layout TND, which compute no score between
documents.

The kernel takes where documents end (``actual_seq_qlen``, cumulative, without a leading 0), the rows of a batch one
after the other; a document of no tokens, an end equal to the one before, is nothing.
"""

from __future__ import annotations

import torch

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.attention import stored_bsnd
from mindspeed_fx.kernels.npu import attention as plain
from mindspeed_fx.kernels.npu import check_types, first, in_acl_graph, lowering, within
from mindspeed_fx.kernels.varlen_attention import varlen_attention, varlen_attention_backward

npu = torch.ops.npu
TOKENS, DOCUMENTS = 2**20, 1024
"""Most tokens and most documents of one call: the documentation allows batches of 2K, and lists of ends of 1K."""


def _supports(q, k, v, documents, ends, causal, scale, window=0, op="npu_fusion_attention_v3"):
    if ends is None:
        return f"{op}: where documents end is not known, only the number of each token's document"
    return first(
        f"{op}: layout TND in an ACL graph; valid there: BNSD" if in_acl_graph() else None,
        within(f"{op}: tokens", hint(q.shape[0]) * q.shape[2], 1, TOKENS),
        within(f"{op}: documents", ends.shape[0], 1, DOCUMENTS),
        plain._supports(q, k, v, None, causal, scale, window, op=op),
    )


def _supports_backward(grad, q, k, v, out, lse, documents, ends, causal, scale, window=0):
    op = "npu_fusion_attention_grad_v3"
    return _supports(q, k, v, documents, ends, causal, scale, window, op) or check_types((q.dtype,), grad=grad, out=out)


def _call_arguments(q, ends, causal, window) -> dict:
    lengths = ends.to(torch.int64)
    if q.device.type != "cpu":
        lengths = lengths.cpu()  # the kernel reads them on the host
    arguments = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths, "softmax_layout": "TND", "sparse_mode": 0}
    if causal:
        arguments.update(
            atten_mask=plain._band(plain.TRIANGLE, plain.TRIANGLE, 0, q.device),
            sparse_mode=4 if window else 3,
            pre_tockens=window - 1 if window else plain.FULL,
            next_tockens=0,
        )
    return arguments


def _tnd(x):
    """[batch, heads, seq, ...] as [batch * seq, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _back(x, batch):
    """[batch * seq, heads, ...] as [batch, heads, seq, ...]."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


@lowering(varlen_attention, "npu_fusion_attention_v3 in TND", _supports, ("npu_fusion_attention_v3",))
def _attention(q, k, v, documents, ends, causal, scale, window=0):
    out, top, total, *_ = npu.npu_fusion_attention_v3(
        _tnd(q), _tnd(k), _tnd(v), q.shape[1], "TND", scale=scale, **_call_arguments(q, ends, causal, window)
    )
    return _back(out, q.shape[0]), stored_bsnd(_back(top[..., 0] + total[..., 0].log(), q.shape[0]))


@lowering(
    varlen_attention_backward,
    "npu_fusion_attention_grad_v3 in TND",
    _supports_backward,
    ("npu_fusion_attention_grad_v3",),
)
def _attention_backward(grad, q, k, v, out, lse, documents, ends, causal, scale, window=0):
    top = _tnd(lse).unsqueeze(-1).expand(-1, -1, 8).contiguous()
    dq, dk, dv, *_ = npu.npu_fusion_attention_grad_v3(
        _tnd(q),
        _tnd(k),
        _tnd(v),
        _tnd(grad),
        q.shape[1],
        "TND",
        softmax_max=top,
        softmax_sum=torch.ones_like(top),
        attention_in=_tnd(out),
        scale_value=scale,
        **_call_arguments(q, ends, causal, window),
    )
    return tuple(_back(g, q.shape[0]) for g in (dq, dk, dv))
