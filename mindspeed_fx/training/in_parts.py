"""Token-axis pipelining by declaration: a module's rows in parts that do not know of each other, in one graph.

    layer.moe = mindspeed_fx.in_parts(layer.moe, 2)            # pipe-experts: tokens, dim 0 layer =
    mindspeed_fx.in_parts(layer, 2, dim=1)             # Ampipe: samples of [seq, batch, hidden], attention and experts

What overlap.decompose cannot see to be independent, it leaves whole: tokens that are sorted by their expert, and an
all_to_all whose split sizes are known at run time only. Here the user says so. Each part routes its own rows, with
split sizes of its own; its collectives depend on nothing of the others, and overlap.schedule runs them under the
others' attention and experts, forward and backward.

Source: MindSpeed's ``--use-pipe-experts`` and ``--ampipe-degree``; Zhang et al. 2023, "MPipeMoE".
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import nn

from mindspeed_fx.arguments import check_instance, refuse


def in_parts(module: nn.Module, parts: int, dim: int = 0, arguments: Sequence[int | str] = (0,)) -> nn.Module:
    """``module`` computed on ``parts`` pieces of its rows, whose results are put together.

    The module must treat rows alone: a row of the result depends on the same row of the arguments only (tokens for
    experts without a capacity; whole samples for attention). Sums over rows, such as losses that balance experts, would
    be those of a part. Gradients of weights are sums over the parts, equal within rounding. Parameters, their names and
    buffers are the module's own.

    Args:
        module: takes and returns tensors, or tuples of tensors, that have the rows along ``dim``.
        parts: 2 or more; the sizes of the parts differ by at most one row.
        dim: the dimension of the rows.
        arguments: positions or names of the arguments that have rows; others are handed to every part.

    Raises:
        ValueError: no module, fewer than 2 parts, no argument or one twice. When called: fewer rows than parts, rows of
            different numbers, an argument that is missing, or a result without rows.
    """
    check_instance("in_parts", "module", module, nn.Module, "a torch.nn.Module is expected")
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 2:
        refuse("in_parts", "parts", parts, "valid: 2, 3 ...")
    if isinstance(dim, bool) or not isinstance(dim, int):
        refuse("in_parts", "dim", dim, "the number of a dimension is expected")
    named = isinstance(arguments, (list, tuple)) and all(isinstance(a, (int, str)) for a in arguments)
    if not named or not arguments or len(set(arguments)) < len(arguments):
        refuse("in_parts", "arguments", arguments, "positions or names are expected, at least one, none twice: (0,)")
    return _Parts(module, parts, dim, tuple(arguments))


class _Parts(nn.Module):
    def __init__(self, module: nn.Module, parts: int, dim: int, arguments: tuple[int | str, ...]):
        super().__init__()
        self.module, self.parts, self.dim, self.arguments = module, parts, dim, arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs.items())
        pieces: dict[int | str, list[torch.Tensor]] = {}
        rows = None
        for name in self.arguments:
            x = arguments.get(name)
            if not isinstance(x, torch.Tensor) or not -x.dim() <= self.dim < x.dim():
                raise ValueError(
                    f"in_parts: argument {name!r} is {_describe(x)}; valid: a tensor with rows along dimension "
                    f"{self.dim}"
                )
            if rows is not None and x.shape[self.dim] != rows:
                raise ValueError(
                    f"in_parts: argument {name!r} has {x.shape[self.dim]} rows along dimension {self.dim}, another "
                    f"{rows}"
                )
            rows = x.shape[self.dim]
            if rows < self.parts:
                raise ValueError(
                    f"in_parts: argument {name!r} has {rows} rows along dimension {self.dim}; valid: at least "
                    f"{self.parts}, one for each part"
                )
            pieces[name] = list(x.tensor_split(self.parts, self.dim))
        results = []
        for k in range(self.parts):
            own = {name: pieces[name][k] if name in pieces else x for name, x in arguments.items()}
            results.append(self.module(*(own[i] for i in range(len(args))), **{name: own[name] for name in kwargs}))
        return self._together(results, [p.shape[self.dim] for p in pieces[self.arguments[0]]])

    def _together(self, results: list[Any], rows: list[int]) -> Any:
        if isinstance(results[0], (tuple, list)):
            return type(results[0])(self._together(list(same), rows) for same in zip(*results, strict=True))
        if results[0] is None:
            return None
        for x, size in zip(results, rows, strict=True):
            if not isinstance(x, torch.Tensor) or not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] != size:
                raise ValueError(
                    f"in_parts: a part of {size} rows returned {_describe(x)}; valid: tensors with as many rows along "
                    f"dimension {self.dim}, tuples of them, None"
                )
        return torch.cat(results, self.dim)


def _describe(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
