"""How every ATen operator runs on divided values.

DTensor runs those that it is known to compute rightly, forward and backward (:data:`TRUSTED`); others that work element
by element, or along some of their dimensions, run on each rank's parts (:func:`strategies`); everything else, also what
is not known here, runs on whole values. A sum over ranks that is not yet made goes only into what is linear in it.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import dtensor, strided_shards, symbols
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.graph import op_sets
from mindspeed_fx.kernels.sharding import along
from mindspeed_fx.sharding.spmd import draws
from mindspeed_fx.sharding.spmd.parts import Strategy, run_in_parts
from mindspeed_fx.sharding.spmd.redistribute import is_divided_twice, summed_at

aten = torch.ops.aten
LINEAR = frozenset(
    "add sub neg mul div to _to_copy sum clone contiguous alias detach view reshape _unsafe_view flatten unflatten "
    "transpose permute t mT movedim unsqueeze squeeze expand expand_as".split()
)
"""Operators whose arguments may be sums over ranks that are not yet made: linear in each of them."""

TRUSTED = frozenset(
    [
        *LINEAR,
        *"view_as reshape_as swapaxes swapdims numpy_T matrix_H adjoint ravel".split(),
        *"slice select narrow split split_with_sizes chunk tensor_split cat concat stack hstack vstack tile "
        "repeat broadcast_tensors broadcast_to unsafe_chunk".split(),
        *"mm bmm matmul addmm baddbmm einsum linear dot mv embedding mean where masked_fill type_as float double half "
        "bfloat16 long int bool".split(),
        *"eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not isnan "
        "isinf sign floor ceil round".split(),
        *"abs exp log log2 log1p expm1 sqrt rsqrt pow square reciprocal sin cos tanh sigmoid relu silu gelu rsub clamp "
        "clamp_min clamp_max maximum minimum".split(),
        *"zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty".split(),
    ]
)
"""Names of operators that DTensor computes rightly on divided values, forward and backward
(tests/sharding/loss_cases.py).
"""

ALONG = {
    **dict.fromkeys(
        "sort argsort topk softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp cummax "
        "cummin flip roll glu index_select unfold".split(),
        True,
    ),
    **dict.fromkeys(
        "median nanmedian max min amax amin aminmax argmax argmin logsumexp std var std_mean var_mean norm "
        "linalg_vector_norm prod nansum nanmean any all count_nonzero quantile nanquantile kthvalue "
        "mode unbind".split(),
        False,
    ),
}
"""Operators that work along the dimensions named by an argument, and whether these stay."""

SPATIAL = {
    f"{kind}{n}d": n
    for n in (1, 2, 3)
    for kind in ("avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool", "conv", "conv_transpose")
}
"""Operators of [batch, channels, ...], and how many dimensions follow."""


def run(target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``target(*args, **kwargs)`` on DTensors, right for every placement of them."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("mindspeed", "_c10d_functional"):
        return target(*args, **kwargs)
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, DTensor)]
    name = name_of(target)
    if tensors and target._schema.is_mutable and op_sets.is_random(target):
        return draws.draw_in_place(target, name, args, kwargs)
    if not tensors:
        return target(*args, **kwargs)
    if target._schema.is_mutable:
        return _write(target, args, kwargs, tensors)
    if name in TRUSTED and not (name == "einsum" and may_be_in_pieces(tensors)):
        args, kwargs = pytree.tree_map_only(DTensor, _summed_for(name, tensors), (args, kwargs))
        return target(*args, **kwargs)
    if name in READS and (terms := _terms(*tensors)):
        return _read_terms(target, args, kwargs, terms)
    if name in CONVOLUTIONS and is_depthwise(target, args, kwargs):
        whole = [REPLICATED] * (len(tensors) - 1)
        return run_in_parts(_of_own_channels(target), args, kwargs, [(0, [0, *whole]), (1, [1, *[0 for _ in whole]])])
    if target is aten.repeat_interleave.self_int:  # the size of the result that it may be told is that of the whole
        args, kwargs = args[:3], {k: v for k, v in kwargs.items() if k != "output_size"}
    result = pointwise_strategies(tensors) if is_pointwise(target) else strategies(target, args, kwargs, tensors)
    return run_in_parts(target, args, kwargs, result)


def _write(target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], tensors: list[DTensor]) -> Any:
    """An operator that writes in place. DTensor refuses elementwise ones that would need another placement. Of others,
    as ``scatter_add_``, it gives the first argument parts that are another placement's, and adds a number to every term
    of a sum (2.13): those are computed of values, and copied."""
    functional, x = op_sets.functional_form(target), args[0]
    # of a copy the other form has no derivative, and zeros are the same in every placement
    if functional is None or torch.Tag.inplace_view in target.tags or name_of(target) in ("copy_", "zero_"):
        return target(*args, **kwargs)
    known = is_pointwise(target) or name_of(functional) in TRUSTED
    if known and not any(p.is_partial() for t in tensors for p in t.placements):
        return target(*args, **kwargs)
    value = run(functional, args, kwargs)
    return x.copy_(value if value.placements == x.placements else _as_terms(value, x.placements))


def _as_terms(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``x`` at ``placements``, of which sums that are not yet made have equal terms."""
    x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in placements])
    terms = math.prod(
        x.device_mesh.size(i) for i, p in enumerate(placements) if p.is_partial() and p.reduce_op == "sum"
    )
    local = x.to_local() / terms if terms > 1 else x.to_local()
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def may_be_in_pieces(tensors: list[DTensor]) -> bool:
    """Whether several mesh dimensions may divide ``tensors`` or their gradients, or one divides a dimension in pieces,
    or would a view of them that DTensor does not make."""
    if tensors[0].device_mesh.ndim > 1 or not strided_shards.views_make_strided_shards():
        return True
    return any(is_divided_twice(x.placements) for x in tensors)


CONVOLUTIONS = frozenset("conv1d conv2d conv3d".split())


def is_depthwise(target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a convolution has one filter for each channel."""
    arg = bind_arguments(target, args, kwargs)
    return arg["groups"] == arg["input"].shape[1] == arg["weight"].shape[0] and arg["weight"].shape[1] == 1


def _of_own_channels(target: torch._ops.OpOverload) -> Callable:
    """A depthwise convolution of as many channels as there are."""

    def run(*args: Any, **kwargs: Any) -> Any:
        arg = bind_arguments(target, args, kwargs)
        return target(**{**arg, "groups": arg["weight"].shape[0]})

    return run


READS = frozenset("index index_select gather".split())
"""Operators whose result holds elements of the first argument, at places that the others say."""


def _terms(x: DTensor, *others: DTensor) -> list[int]:
    """Mesh dimensions along which ``x`` is a sum that is not yet made, and the ``others`` are whole."""
    return [
        i
        for i, p in enumerate(x.placements)
        if p.is_partial() and p.reduce_op == "sum" and all(o.placements[i].is_replicate() for o in others)
    ]


def _read_terms(target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], terms: list[int]) -> DTensor:
    """An operator of :data:`READS` on each rank's term of a sum: its result is a sum too, with a gradient that is whole
    on every rank."""

    def labelled(x: DTensor, label: Any) -> DTensor:
        placements = [label if i in terms else p for i, p in enumerate(x.placements)]
        gradient = [Replicate() if i in terms else p for i, p in enumerate(x.placements)]
        local = x.to_local(grad_placements=gradient)
        return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())

    x, *rest = args
    return labelled(run(target, (labelled(x, Replicate()), *rest), kwargs), Partial())


def is_sized_by_data(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an argument has a size that is known only when the program runs (``x[mask]``). Such values are whole, and
    DTensor cannot place what is made of them: their operators run on whole values, whichever they are."""
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, DTensor)]
    return any(symbols.is_known_by_data(size) for x in tensors for size in x.shape)


def name_of(target: torch._ops.OpOverload) -> str:
    return target._schema.name.split("::")[1]


def is_pointwise(target: torch._ops.OpOverload) -> bool:
    """Whether every element of the results is made of the same element of each argument, and drawn of none."""
    return op_sets.is_pointwise(target) and not op_sets.is_random(target)


def _summed_for(name: str, tensors: list[DTensor]) -> Callable[[DTensor], DTensor]:
    """What makes the sums of ``tensors`` that the operator ``name`` cannot take as they are."""
    mesh = tensors[0].device_mesh
    bilinear = name in ("mul", "div")

    def takes(i: int) -> bool:
        placements = [x.placements[i] for x in tensors]
        partial = [p for p in placements if p.is_partial()]
        if any(p.reduce_op != "sum" for p in partial) or name not in LINEAR:
            return False
        if bilinear:
            return len(partial) <= 1 and not (name == "div" and placements[-1].is_partial() and len(placements) > 1)
        return len(partial) in (0, len(placements))

    summed = [not takes(i) for i in range(mesh.ndim)]

    def make(x: DTensor) -> DTensor:
        wanted = [Replicate() if s and p.is_partial() else p for s, p in zip(summed, x.placements)]
        return x if wanted == list(x.placements) else summed_at(x, wanted)

    return make


# ------------------------------------------------------------------ rules


def strategies(
    target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], tensors: list[DTensor]
) -> list[Strategy]:
    """How ``target`` may be divided; empty: not at all."""
    name, arg = name_of(target), bind_arguments(target, args, kwargs)
    x, rest = tensors[0], tensors[1:]
    if name in ALONG:
        over = dimensions(arg, x.ndim)
        kept = ALONG[name] or bool(arg.get("keepdim"))
        return [] if over is None else by_other_dimensions(x.ndim, over, kept, len(rest))
    if name in ("gather", "scatter", "scatter_add", "scatter_reduce"):
        own = [
            d
            for d in range(x.ndim)
            if d != arg["dim"] % x.ndim and all(t.ndim == x.ndim and t.shape[d] == x.shape[d] for t in rest)
        ]
        return [(d, [d] * len(tensors)) for d in own]
    if name in ("slice_scatter", "select_scatter"):
        at = arg["dim"] % x.ndim
        gone = name == "select_scatter"
        return [(d, [d, d - (gone and d > at)]) for d in range(x.ndim) if d != at]
    if name in SPATIAL or name == "convolution" or name.startswith("upsample_"):
        spatial = SPATIAL.get(name, x.ndim - 2)
        return [(0, [0] + [REPLICATED] * len(rest))] if x.ndim == spatial + 2 else []
    rule = RULES.get(name)
    return rule(arg, x, rest) if rule is not None else []


def pointwise_strategies(tensors: list[DTensor]) -> list[Strategy]:
    """By every dimension of what the arguments become when they are broadcast."""
    ndim = max(t.ndim for t in tensors)
    return [(d, [along(t, d, ndim) for t in tensors]) for d in range(ndim)]


def by_other_dimensions(ndim: int, over: list[int], kept: bool, others: int) -> list[Strategy]:
    """By every dimension of [ndim] but those ``over`` which an operator works; the ``others`` arguments are whole."""
    own = [d for d in range(ndim) if d not in over]
    return [(d if kept else d - sum(o < d for o in over), [d] + [REPLICATED] * others) for d in own]


def _leading(last: int) -> Callable[[dict, DTensor, list[DTensor]], list[Strategy]]:
    """By every dimension of the first argument but the ``last`` ones."""
    return lambda arg, x, rest: [(d, [d] + [REPLICATED] * len(rest)) for d in range(x.ndim - last)]


def _normalize_dims(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    return _leading(len(arguments["normalized_shape"]))(arguments, x, rest)


def _pad(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    pad = list(arguments["pad"])
    over = [x.ndim - 1 - i // 2 for i, n in enumerate(pad) if n]
    return by_other_dimensions(x.ndim, over, True, len(rest))


def _one_hot(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    return _leading(0)(arguments, x, rest) if arguments["num_classes"] > 0 else []


def _index_add(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    return [(d, [d, REPLICATED, d]) for d in range(x.ndim) if d != arguments["dim"] % x.ndim]


def _diff(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    """What stands before and behind ``x`` is divided as it is."""
    return [(d, [d] * (1 + len(rest))) for d in range(x.ndim) if d != arguments["dim"] % x.ndim]


def _einsum(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    """By every letter: of the result, or summed over, which leaves a sum over ranks. DTensor (2.13) views the operands
    for a product of matrices, and cannot part what several mesh dimensions divide."""
    terms, arrow, result = arguments["equation"].replace(" ", "").partition("->")
    operands = terms.split(",")
    if not arrow or "." in terms or any(len(set(term)) < len(term) for term in operands):
        return []
    summed = sorted(set("".join(operands)) - set(result))
    return [
        (d, [term.index(letter) if letter in term else REPLICATED for term in operands])
        for d, letter in [*enumerate(result), *((PARTIAL, letter) for letter in summed)]
    ]


def _repeat_interleave(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    return [] if rest or arguments["dim"] is None else _leading(0)(arguments, x, rest)


def _by_batch(arguments: dict, x: DTensor, rest: list[DTensor]) -> list[Strategy]:
    return [(0, [0] + [REPLICATED] * len(rest))]


RULES: dict[str, Callable[[dict, DTensor, list[DTensor]], list[Strategy]]] = {
    "layer_norm": _normalize_dims, "native_layer_norm": _normalize_dims, "rms_norm": _normalize_dims,
    "group_norm": _by_batch,
    "tril": _leading(2), "triu": _leading(2),
    "pad": _pad, "constant_pad_nd": _pad,
    "one_hot": _one_hot, "bucketize": _leading(0),
    "index_add": _index_add,
    "diff": _diff,
    "repeat_interleave": _repeat_interleave,
    "einsum": _einsum,
}  # fmt: skip


def bind_arguments(target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name in the schema's order, defaults among them."""
    schema = target._schema.arguments
    positional = {a.name: v for a, v in zip(schema, args)} | kwargs
    return {
        a.name: positional.get(a.name, a.default_value) for a in schema if a.name in positional or a.has_default_value()
    }


def dimensions(arguments: dict[str, Any], ndim: int) -> list[int] | None:
    """The dimensions along which an operator works; None: all."""
    dim = next((arguments[n] for n in ("dim", "dims", "dimension") if n in arguments), None)
    if dim is None or dim == [] or not ndim:
        return None
    return sorted(d % ndim for d in ([dim] if isinstance(dim, int) else dim))


def is_divided_along(x: DTensor, dims: list[int] | None) -> bool:
    """Whether ranks share one of the dimensions (None: any) of ``x``."""
    return any(dtensor.is_divided(p) and (dims is None or p.dim in dims) for p in x.placements)
