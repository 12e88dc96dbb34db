"""``--tp-2d``: tensor parallelism in two dimensions, x times y ranks.

Rank t = i y + j of a tensor-parallel group, i < x, j < y, holds of a sequence of s tokens and a width of h

    between layers     tokens i of x parts, channels j of y      [s/x, batch, h/y]
    qkv, fc1           weight [out/x, h/y]                       rows i, columns j
    proj, fc2          weight [h/y, in/x]                        rows j, columns i
    between stages     the same numbers, as [s/(x y), batch, h]

A product gathers its tokens along one dimension of the ranks and sums along the other, onto its own part of the tokens
(the MLP) or of the heads (attention, whose heads are those of tensor parallelism over t). Norms send one number a token
along y. A step moves 1/y and 1/x of what tensor parallelism in one dimension gathers and sums, and values are its own.
Source: MindSpeed's high-dimension tensor parallelism; Xu et al. 2021, "An Efficient 2D Method".
"""

from __future__ import annotations

import functools
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_fx.megatron import collectives, groups, tp_2d_states
from mindspeed_fx.megatron.run_arguments import training_arguments
from mindspeed_fx.megatron.tp_2d_states import Place

FLAG = "--tp-2d"


@dataclass(frozen=True)
class Grid:
    """The ranks of a tensor-parallel group.

    Args:
        x: the group of ranks with this one's j.
        y: the group of ranks with this one's i.
    """

    x: Any
    y: Any


_grids: dict[Any, Grid] = {}


def grid_of(group: Any, columns: int) -> Grid:
    """``group`` in rows of ``columns`` ranks; made when it is first asked for, by all processes of the job."""
    if group not in _grids:
        own, rank = dist.get_process_group_ranks(group), group.rank()
        rows, lines = [], []
        for ranks in groups.everybodys(group):
            row = [list(ranks[k : k + columns]) for k in range(0, len(ranks), columns)]
            rows += row
            lines += [list(line) for line in zip(*row)]
        y, _ = dist.new_subgroups_by_enumeration(rows)
        x, _ = dist.new_subgroups_by_enumeration(lines)
        assert x.size() * columns == len(own) and y.rank() == rank % columns
        _grids[group] = Grid(x, y)
    return _grids[group]


def message_length(tokens: int) -> int:
    """Tokens of what stages send each other, of ``tokens`` tokens."""
    args = training_arguments()
    return tokens // (args.tp_x * args.tp_y) if args is not None and getattr(args, "tp_2d", False) else tokens


def with_message_length(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Megatron's interleaved schedule, which reads ``seq_length`` for the shape of messages alone."""
    length = message_length(kwargs["seq_length"])
    return kwargs if length == kwargs["seq_length"] else {**kwargs, "seq_length": length, "decoder_seq_length": None}


class _Divided(nn.Module):
    """A layer whose weight is a part of a whole one.

    Args:
        is_gated: its rows are those of two halves.
    """

    weight: nn.Parameter

    def __init__(self, grid: Grid, is_gated: bool = False) -> None:
        super().__init__()
        self.grid, self.is_gated = grid, is_gated

    @property
    def _i(self) -> Place:
        return 0, self.grid.x.rank(), self.grid.x.size()

    @property
    def _j(self) -> Place:
        return 0, self.grid.y.rank(), self.grid.y.size()

    def places(self) -> tuple[Place, ...]:
        """Which part of the whole weight it is, by dimension."""
        raise NotImplementedError

    def copy(self) -> int:
        """Which one of the ranks with the same part this is."""
        return 0

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Place, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Of Megatron's distributed checkpoints."""
        rest = (f"{prefix}weight", self.places(), sharded_offsets, metadata)
        if self.is_gated:
            return tp_2d_states.sharded_halves(self.weight, *rest)
        return tp_2d_states.sharded(self.weight, *rest, self.copy())


class _Linear(_Divided):
    """With an empty state, which Megatron's linears have for TransformerEngine's sake."""

    def get_extra_state(self) -> None:
        """Nothing."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Place, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        weight = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return weight | tp_2d_states.empty(f"{prefix}_extra_state", sharded_offsets)


class ColumnLinear(_Linear):
    """x [s/x, b, in/y] -> [s/y, b, out/x] (the MLP), or the rank's heads [s, b, out/(x y)] (attention).

    Args:
        linear: Megatron's of one dimension, with weight [out/(x y), in].
        is_attention: its results are heads.
        is_gated: rows are those of two halves.
    """

    def __init__(self, linear: Any, grid: Grid, is_attention: bool, is_gated: bool = False) -> None:
        super().__init__(grid, is_gated)
        self.is_attention = is_attention
        parts = collectives.gather(linear.weight, grid.y)  # [out/x, in]
        if is_gated:
            shape = (grid.y.size(), 2, -1, parts.shape[1])
            parts = parts.view(shape).transpose(0, 1).reshape(parts.shape)
        self.weight = _divided(linear.weight, parts.chunk(grid.y.size(), 1)[grid.y.rank()])

    def places(self) -> tuple[Place, ...]:
        return self._i, (1, *self._j[1:])

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        whole = collectives.gather_from_sequence_parallel_region(x, True, self.grid.x)
        partial = functional.linear(whole, self.weight)
        if self.is_attention:
            return collectives.reduce_scatter_last_dim_to_tensor_parallel_region(partial, self.grid.y), None
        return collectives.reduce_scatter_to_sequence_parallel_region(partial, self.grid.y), None


class RowLinear(_Linear):
    """x [s/y, b, in/x] (the MLP), or heads [s, b, in/(x y)] (attention) -> [s/x, b, out/y].

    Args:
        linear: Megatron's of one dimension, with weight [out, in/(x y)].
        is_attention: what it is given are heads.
    """

    def __init__(self, linear: Any, grid: Grid, is_attention: bool) -> None:
        super().__init__(grid)
        self.is_attention = is_attention
        parts = collectives.gather(linear.weight.t(), grid.y).t()  # [out, in/x]
        self.weight = _divided(linear.weight, parts.chunk(grid.y.size(), 0)[grid.y.rank()])

    def places(self) -> tuple[Place, ...]:
        return self._j, (1, *self._i[1:])

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        if self.is_attention:
            whole = collectives.all_gather_last_dim_from_tensor_parallel_region(x, self.grid.y)
        else:
            whole = collectives.gather_from_sequence_parallel_region(x, True, self.grid.y)
        partial = functional.linear(whole, self.weight)
        return collectives.reduce_scatter_to_sequence_parallel_region(partial, self.grid.x), None


class RMSNorm(_Divided):
    """x / rms(x) * weight of rows that y ranks share, x [s/x, b, h/y].

    Args:
        norm: of whole rows, with weight [h].
    """

    def __init__(self, norm: Any, grid: Grid) -> None:
        super().__init__(grid)
        self.eps, self.width = norm.eps, norm.weight.shape[0]
        self.weight = _divided(norm.weight, norm.weight.detach().chunk(grid.y.size(), 0)[grid.y.rank()])
        self.weight.tensor_model_parallel = grid.x.rank() == 0  # in norms of gradients once

    def places(self) -> tuple[Place, ...]:
        return (self._j,)

    def copy(self) -> int:
        return self.grid.x.rank()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.pow(2).sum(-1, keepdim=True)
        total = collectives.reduce_from_tensor_model_parallel_region(squares, self.grid.y)
        total = collectives.copy_to_tensor_model_parallel_region(total, self.grid.y)  # summed both ways
        # the ranks along x have other tokens
        weight = collectives.copy_to_tensor_model_parallel_region(self.weight, self.grid.x)
        return (wide * torch.rsqrt(total / self.width + self.eps)).to(x.dtype) * weight


def _divided(like: Any, part: Tensor) -> nn.Parameter:
    """A weight with the marks of ``like``."""
    weight = nn.Parameter(part.detach().to(like.dtype).clone(memory_format=torch.contiguous_format))
    for mark, value in vars(like).items():
        setattr(weight, mark, value)
    weight.tensor_model_parallel = True
    return weight


def divide(model: Any, args: Namespace) -> None:
    """Divide the layers of a GPTModel, or of a stage of one, whose linears are those of tensor parallelism in one
    dimension.
    """
    from megatron.core import parallel_state

    grid = grid_of(parallel_state.get_tensor_model_parallel_group(), args.tp_y)
    gated, decoder = model.config.gated_linear_unit, model.decoder
    for layer in decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv = ColumnLinear(attention.linear_qkv, grid, True)
        attention.linear_proj = RowLinear(attention.linear_proj, grid, True)
        mlp.linear_fc1 = ColumnLinear(mlp.linear_fc1, grid, False, gated)
        mlp.linear_fc2 = RowLinear(mlp.linear_fc2, grid, False)
        mlp.sharded_state_dict = functools.partial(_states_of_mlp, mlp)  # Megatron's divides rows alone
        layer.input_layernorm = RMSNorm(layer.input_layernorm, grid)
        layer.pre_mlp_layernorm = RMSNorm(layer.pre_mlp_layernorm, grid)
    if decoder.final_layernorm is not None:
        decoder.final_layernorm = RMSNorm(decoder.final_layernorm, grid)
    if not model.pre_process and (rotary := getattr(model, "rotary_pos_emb", None)) is not None:
        rotary.get_rotary_seq_len = _of_whole_tokens(rotary.get_rotary_seq_len, args.tp_x * args.tp_y)
    decoder.pre_process = True  # its input is given
    decoder.forward = _between_parts(decoder, grid, model.pre_process, model.post_process)


def _states_of_mlp(mlp: Any, prefix: str = "", *rest: Any, **more: Any) -> dict[str, Any]:
    states = {}
    for name in ("linear_fc1", "linear_fc2"):
        states |= getattr(mlp, name).sharded_state_dict(f"{prefix}{name}.", *rest, **more)
    return states


def _of_whole_tokens(length: Callable[..., int], parts: int) -> Callable[..., int]:
    """``get_rotary_seq_len`` of a stage whose input has one of ``parts`` parts of the tokens."""
    return lambda *args, **kwargs: parts * length(*args, **kwargs)


def _between_parts(decoder: Any, grid: Grid, is_first: bool, is_last: bool) -> Callable[..., Tensor]:
    """The decoder's forward, from and to whole hidden states [s, b, h], or messages between stages [s/(x y), b, h]."""
    run = decoder.forward
    y = grid.y.size()

    def forward(hidden_states: Tensor | None, *others: Any, **more: Any) -> Tensor:
        if is_first:
            assert hidden_states is not None
            part = collectives.scatter_to_sequence_parallel_region(hidden_states, grid.x)
            part = collectives.scatter_to_tensor_model_parallel_region(part, grid.y)
        else:
            length, batch, width = decoder.input_tensor.shape
            part = decoder.input_tensor.view(length * y, batch, width // y)
        part = run(part, *others, **more)
        if is_last:
            part = collectives.gather_from_tensor_model_parallel_region(part, grid.y)
            return collectives.gather_from_sequence_parallel_region(part, False, grid.x)
        from megatron.core.utils import make_viewless_tensor

        length, batch, width = part.shape
        message = part.view(length // y, batch, width * y)
        return make_viewless_tensor(inp=message, requires_grad=True, keep_graph=True)

    return forward
