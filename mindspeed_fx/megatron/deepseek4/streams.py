"""Manifold-constrained hyper-connections (mHC; Xie et al. 2025, arXiv 2512.24880, section 4, as DeepSeek-V4 has them).

A token has n residual streams X [n, hidden]. Before a sublayer f, with v = (W flat(X)) / rms(flat(X)) split into three,

    pre = sigmoid(s_0 v_0 + b_0) + e,    post = 2 sigmoid(s_1 v_1 + b_1),    C = sinkhorn(s_2 v_2 + b_2),
    X' = post f(pre X)^T + C^T X,

where sinkhorn makes of a matrix nearly one whose rows and columns add up to 1: softmax of its rows plus e, columns
divided by their sums, and then rows and columns in turn, t - 1 times. All of it is in float32 or better.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.deepseek4.parts import linear, mark, wide
from mindspeed_fx.megatron.deepseek4.settings import Settings
from mindspeed_fx.megatron.run_arguments import training_arguments

COMMUNICATE = "pipeline_parallel.p2p_communication:P2PCommunicator._communicate"


class Mixing(nn.Module):
    """Weights of the streams, by MindSpeed-LLM's names.

    Args:
        config: Megatron's TransformerConfig.
        settings: of the layers.
        parts: entries of v, each of which has a scale.
    """

    def __init__(self, config: Any, settings: Settings, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.settings, self.parts, self.epsilon = settings, parts, config.layernorm_epsilon
        placed = dict(device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.hc_fn = linear(config, settings.streams * config.hidden_size, sum(parts), is_local=True)
        self.hc_base = nn.Parameter(torch.zeros(sum(parts), **placed))
        self.hc_scale = nn.Parameter(torch.zeros(len(parts), **placed))
        mark(self, config, is_local=True)

    def coefficients(self, streams: Tensor) -> list[Tensor]:
        """s v + b, part by part, of streams [..., n, hidden]."""
        flat = wide(streams.flatten(-2))
        root = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.epsilon)
        mixed = functional.linear(flat, self.hc_fn.weight.to(flat.dtype)) * root
        scales, bases = wide(self.hc_scale).unbind(0), wide(self.hc_base).split(self.parts)
        return [v * s + b for v, s, b in zip(mixed.split(self.parts, -1), scales, bases)]


class HyperConnection(Mixing):
    """The streams around a sublayer."""

    def __init__(self, config: Any, settings: Settings) -> None:
        n = settings.streams
        super().__init__(config, settings, (n, n, n * n))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(what the sublayer gets [..., hidden], post [..., n], C [..., n, n]) of streams [..., n, hidden]."""
        pre, post, matrix = self.coefficients(streams)
        n, epsilon = self.settings.streams, self.settings.stream_epsilon
        one = collapse(streams, pre.sigmoid() + epsilon)
        mixing = sinkhorn(matrix.view(*matrix.shape[:-1], n, n), self.settings.iterations, epsilon)
        return one, 2 * post.sigmoid(), mixing


class StreamsHead(Mixing):
    """One of the streams, behind the last layer: pre X."""

    def __init__(self, config: Any, settings: Settings) -> None:
        super().__init__(config, settings, (settings.streams,))

    def forward(self, streams: Tensor) -> Tensor:
        """[..., hidden] of streams [..., n, hidden]."""
        (pre,) = self.coefficients(streams)
        return collapse(streams, pre.sigmoid() + self.settings.stream_epsilon)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """pre X: [..., hidden] of streams [..., n, hidden] and pre [..., n]."""
    return (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


def expand(streams: Tensor, added: Tensor, post: Tensor, mixing: Tensor) -> Tensor:
    """post f^T + C^T X: [..., n, hidden] of streams, what the sublayer has made [..., hidden], post [..., n] and C."""
    mixed = torch.matmul(mixing.transpose(-1, -2), streams.to(mixing.dtype))
    return (post.unsqueeze(-1) * added.unsqueeze(-2) + mixed).to(streams.dtype)


def sinkhorn(matrix: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Matrices [..., n, n] whose rows and columns nearly add up to 1, columns last."""
    result = matrix.softmax(-1) + epsilon
    result = result / (result.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        result = result / (result.sum(-1, keepdim=True) + epsilon)
        result = result / (result.sum(-2, keepdim=True) + epsilon)
    return result


def repeat(x: Tensor, streams: int) -> Tensor:
    """[..., n, hidden]: streams that are all x [..., hidden] at first."""
    return x.unsqueeze(-2).repeat(*[1] * (x.dim() - 1), streams, 1)


def widen(model: nn.Module) -> None:
    """Turn the weights of streams in a 16-bit model to float32, in place, the same parameters."""
    for mixing in (m for m in model.modules() if isinstance(m, Mixing)):
        for parameter in mixing.parameters():
            parameter.data = parameter.data.float()


def communicate(self: Any, *, tensor_shape: Any, **kwargs: Any) -> Any:
    """``P2PCommunicator._communicate``: stages of a model with streams send [seq, batch, n, hidden]."""
    return patches.original(COMMUNICATE)(self, tensor_shape=message_shape(tensor_shape), **kwargs)


def message_shape(shape: Any) -> Any:
    """The shape of a message between stages, of which Megatron knows [seq, batch, hidden]."""
    streams = getattr(training_arguments(), "streams_between_stages", None)
    return shape if streams is None or shape is None else (*shape[:-1], streams, shape[-1])


def table() -> list[patches.Patch]:
    """The patch, which does nothing without --enable-mhc."""
    return [patches.Patch(COMMUNICATE, communicate, "--enable-mhc: stages send several streams", patches.EVERYWHERE)]
