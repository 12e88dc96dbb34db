"""Which kernel runs attention with dropout on CPU: our own flash kernel, or blocks of rows."""

from __future__ import annotations

from mindspeed_fx.kernels.attention_dropout import attention_dropout, attention_dropout_backward
from mindspeed_fx.kernels.cpu import attention_flash
from mindspeed_fx.kernels.cpu.attention_blocked import attention_blocked, attention_blocked_backward, supports_blocks


def _own_supports(q, k, v, keep, mask, *settings):
    return attention_flash.supports(q, k, v, mask)


@attention_dropout.lower("cpu")("flash attention in C++", _own_supports)
def _own(q, k, v, keep, mask, causal, scale, window, softcap, p):
    return attention_flash.attention_flash.overload(q, k, v, causal, scale, window, softcap, None, mask, keep, p)


@attention_dropout_backward.lower("cpu")(
    "flash attention backward in C++",
    lambda grad, q, k, v, out, lse, keep, mask, *settings: attention_flash.supports_backward(grad, q, k, v, mask),
)
def _own_backward(grad, q, k, v, out, lse, keep, mask, causal, scale, window, softcap, p):
    return attention_flash.attention_flash_backward.overload(
        grad, q, k, v, out, lse, causal, scale, window, softcap, mask, keep, p
    )


def _blocked_supports(q, k, v, keep, mask, causal, *settings):
    return supports_blocks(q, k, mask, causal)


@attention_dropout.lower("cpu")("attention in blocks of rows", _blocked_supports)
def _attend_blocked(q, k, v, keep, mask, causal, scale, window, softcap, p):
    return attention_blocked.overload(q, k, v, scale, window, softcap, keep, p)


@attention_dropout_backward.lower("cpu")(
    "attention backward in blocks of rows", lambda grad, q, k, v, out, lse, *rest: _blocked_supports(q, k, v, *rest)
)
def _blocked_backward(grad, q, k, v, out, lse, keep, mask, causal, scale, window, softcap, p):
    return attention_blocked_backward.overload(grad, q, k, v, out, lse, scale, window, softcap, keep, p)
