"""The operator that takes the place of an attention, target by target, and the arguments that it is given."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.compat import dispatcher
from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.attention_dropout import attention_dropout
from mindspeed_fx.kernels.attention_seeded import attention_seeded
from mindspeed_fx.kernels.cpu import attention_flash
from mindspeed_fx.kernels.varlen_attention import varlen_attention
from mindspeed_fx.passes.base import Context, Miss
from mindspeed_fx.passes.fusion.analysis import alibi, mask
from mindspeed_fx.passes.fusion.analysis.attention_scores import Scores
from mindspeed_fx.passes.fusion.analysis.bands import CAUSAL, Band, is_causal, is_window, together
from mindspeed_fx.passes.fusion.emit import alibi as alibi_emit
from mindspeed_fx.passes.fusion.emit import fully_masked_rows, packed_sequences, sdpa
from mindspeed_fx.passes.fusion.emit.attention_operands import operands, put

DROPOUT_ROWS, DROPOUT_MASKED_ROWS = 256, 512
"""Attention with dropout is left to generated code below this many rows, and below this many in float32 with a mask
(of the time of generated code, forward and backward on one core, float32: 128 rows 0.94 to 1.04, 512 rows 0.53 to 0.74,
with a mask 1.18 and 0.78, benchmarks/results/2026-11-30-dropout.txt; by an earlier script 256 rows 0.80 to 0.97, with a
mask 1.2, and bfloat16 256 rows 0.47 to 0.93)."""

TRAINED = "0.69 of the time at 256 rows, 0.81 to 0.83 at 512"
"""Of attention with a bias that is trained, unfused in generated code: forward and backward in float32, 2 x 8 heads of
64, one core.
"""

MASKED_ROWS, NARROW_ROWS = 256, 768
"""Attention of fewer rows is left to generated code: with a mask or documents (float32: 128 rows 1.1 to 1.3 of its
time, 256 rows 0.8 to 1.0; bfloat16 where products are of tiles: 64 and 128 rows 1.1 to 1.7, 256 rows 0.8 to 1.0),
and in 16 bits where ATen's kernels run alone (128 rows 2.0 to 2.6, 512 rows 1.0 to 1.5, 768 rows 0.5 to 0.7; ours from
64 rows on 0.05 to 0.3), forward and backward on two cores (benchmarks/attention_short.py)."""

Emit = Callable[..., list[fx.Node]]


def emitter(name: str, context: Context, notes: list[str]) -> Emit:
    """What puts the target's operator in the place of an attention: f(graph, root, scores, q, k, v) -> region, or
    :class:`Miss`. ``notes`` gets what there is to say of an attention that is fused all the same: why packed documents
    are masked, which rows differ."""
    generated = context.left_to_inductor(name)
    npu = context.options.target == "npu"
    packing = functools.partial(_emit_varlen, npu=npu)
    dropping = (
        functools.partial(_emit_seeded, parallelized=context.plan is not None)
        if npu
        else functools.partial(
            _emit_dropout, name=name, generated=generated, uniform=context.options.codegen == "inductor"
        )
    )
    if context.options.target == "cuda":
        return functools.partial(sdpa.emit, notes=notes)
    return functools.partial(_emit, dropping=dropping, packing=packing, notes=notes, generated=generated)


def build(scores: Scores) -> None:
    """Puts the calls that reading the ``scores`` asked for into the graph."""
    scores.q, scores.k_transposed, scores.sinks = map(rewrite.build, (scores.q, scores.k_transposed, scores.sinks))
    scores.masks = [(kind, rewrite.build(m), where) for kind, m, where in scores.masks]


def _emit(
    gm: fx.GraphModule,
    root: fx.Node,
    scores: Scores,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    *,
    dropping: Callable[..., list[fx.Node]],
    packing: Callable[..., fx.Node | str],
    notes: list[str],
    generated: bool,
) -> list[fx.Node]:
    """``mindspeed::attention`` in the place of ``root``; with dropout what ``dropping`` puts there, with packed
    documents what ``packing`` makes; few rows, and additive masks that need a gradient, are left to ``generated`` code.
    """
    if scores.sinks is None:  # with a sink a row of scores cannot be moved as a whole
        scores.masks = alibi.apart(scores.masks)
    masks = scores.blocking
    bands = [mask.kept_band(m, kind) for kind, m, _ in masks]
    if generated and scores.drop is None:
        _long_enough(
            match.value(q),
            bool(masks) and not any(is_causal(b) or is_window(b) for b in (_together(scores, bands), *bands)),
        )
    if any(b is not None and b.documents is not None for b in bands):
        result = packing(gm, root, scores, q, k, v, bands)
        if isinstance(result, fx.Node):
            return put(gm, root, scores, result)
        if (note := f"packed documents are masked, scores between them computed: {result}") not in notes:
            notes.append(note)
        bands = [b if b is None or b.documents is None else None for b in bands]
    both = _together(scores, bands)
    whole = is_causal(both) or is_window(both)
    windows = [1 - b.low for b in ([both] if whole else bands) if is_window(b)]
    causal = whole or scores.causal or bool(windows) or any(is_causal(b) for b in bands)
    rest = [m for m, band in zip(masks, bands) if band is None or not (whole or is_causal(band) or is_window(band))]
    if scores.sinks is None:
        rest = [
            (kind, alibi_emit.by_keys(gm, root, m, causal) or m if kind == "add" else m, where)
            for kind, m, where in rest
        ]
    if generated and any(kind == "add" and m.meta["needs_grad"] for kind, m, _ in rest):
        raise Miss(
            f"the additive mask needs a gradient, and generated code is faster: it takes {TRAINED}; put "
            '"fusion.attention" in enable to fuse all the same'
        )
    q, k, m, visible_rows = operands(gm, root, scores, q, k, v, rest, notes)
    window = min(windows, default=0)
    keys = match.value(k).shape[2]
    if isinstance(keys, int) and window >= keys:
        window = 0  # reaches every key
    if scores.drop is not None:
        return dropping(gm, root, scores, (q, k, v), m, visible_rows, causal, int(window))
    arguments = (q, k, v, m, causal, scores.scale, int(window), scores.softcap, scores.sinks)
    while len(arguments) > 6 and not arguments[-1]:
        arguments = arguments[:-1]
    both = rewrite.insert(gm, root, torch.ops.mindspeed.attention.default, arguments)
    out = rewrite.insert(gm, root, match.operator.getitem, (both, 0))
    return put(
        gm, root, scores, out if visible_rows is None else fully_masked_rows.with_means(gm, root, out, visible_rows, v)
    )


def _together(scores: Scores, bands: list[Band | None]) -> Band | None:
    """What the masks allow together: half a plane from one and half from another are a window."""
    return together([*bands, CAUSAL] if scores.causal else bands)


def _long_enough(q: torch.Tensor, masked: bool) -> None:
    """Raises :class:`Miss` where generated code is as fast, or faster."""
    rows, narrow = match.hint(q.shape[2]), q.dtype.itemsize < 4
    least = MASKED_ROWS if masked else 1
    if narrow and attention_flash.supports(q, q, q) is not None:
        least = NARROW_ROWS
    elif narrow and not dispatcher.multiplies_tiles(q.dtype):
        return
    if rows < least:
        what = f"{rows} rows in {q.dtype}".replace("torch.", "") if narrow else f"{rows} rows with a mask"
        raise Miss(
            f'{what}: generated code is as fast below {least}; put "fusion.attention" in enable to fuse all the same'
        )


def _emit_varlen(
    gm: fx.GraphModule, root: fx.Node, scores: Scores, q: fx.Node, k: fx.Node, v: fx.Node, bands: list, npu: bool
) -> fx.Node | str:
    """``mindspeed::varlen_attention`` for masks that keep documents apart; why the mask has to be computed."""
    both = _together(scores, bands) if None not in bands else None
    numbers = both.documents if both is not None else None
    if numbers is None:
        return "another mask stands beside theirs"
    for what, existing in (
        ("a soft-cap", scores.softcap),
        ("sinks", scores.sinks is not None),
        ("dropout", scores.drop is not None),
    ):
        if existing:
            return f"the kernel takes no {what}".replace("no a ", "no ")
    batch, _, rows, _ = match.value(q).shape
    causal = both.high == 0
    if not (causal or (both.low, both.high) == (-math.inf, math.inf)):
        return f"a token sees others up to {both.high} places after it, which is neither causal nor all of its document"
    if not _belongs(numbers, [m for _, m, _ in scores.blocking], batch):
        return (
            f"their numbers {tuple(match.value(numbers).shape)} are not one row, or one for each of the batch ({batch})"
        )
    if not statically_known_true(rows == match.value(k).shape[2]) or not statically_known_true(
        rows == match.value(numbers).shape[-1]
    ):
        return (
            f"{rows} queries, {match.value(k).shape[2]} keys and {match.value(numbers).shape[-1]} numbers are not "
            "known to be as many"
        )
    ends = packed_sequences.ends(gm, root, numbers, batch) if npu and isinstance(batch, int) else None
    if npu and ends is None:
        return "on npu the kernel takes rows whose number, and whose lengths or cumulative lengths, the graph knows"
    q, k, *_ = operands(gm, root, scores, q, k, v, [], [])
    if match.value(numbers).dim() == 1:
        numbers = rewrite.insert(gm, root, aten.unsqueeze.default, (numbers, 0))
    window = 0 if both.low == -math.inf else int(1 - both.low)
    arguments = (q, k, v, numbers, ends, causal, scores.scale, window)
    if npu and (chosen := varlen_attention.choose("npu", fx.map_arg(arguments, match.value), {}))[0] is None:
        return "; ".join(chosen[1])
    new = rewrite.insert(gm, root, varlen_attention.overload, arguments)
    return rewrite.insert(gm, root, match.operator.getitem, (new, 0))


def _belongs(numbers: fx.Node, masks: list[fx.Node], batch: Any) -> bool:
    """Whether the rows of ``numbers`` are those of the batch, in masks that are broadcast to [batch, heads, seq,
    seq].
    """
    shape = match.value(numbers).shape
    if len(shape) == 1 or statically_known_true(shape[0] == 1):
        return True
    whole = [
        match.value(m).shape
        for m in masks
        if match.value(m).dim() > 2
        and not statically_known_true(match.value(m).numel() == match.value(m).shape[-1] * match.value(m).shape[-2])
    ]
    return statically_known_true(shape[0] == batch) and all(
        len(s) == 4 and statically_known_true(s[0] == batch) and statically_known_true(s[1] == 1) for s in whole
    )


def _emit_seeded(
    gm: fx.GraphModule,
    root: fx.Node,
    scores: Scores,
    qkv: tuple,
    m: fx.Node | None,
    visible_rows: fx.Node | None,
    causal: bool,
    window: int,
    parallelized: bool,
) -> list[fx.Node]:
    """``mindspeed::attention_seeded`` in the place of ``root``: the kernel draws, numbers of its own. Nothing is
    dropped in rows that are hidden whole.
    """
    what = f"dropout of {scores.p} on the attention weights"
    if parallelized:
        raise Miss(f"{what}: the model is parallelized, and the kernel of every rank would draw the same numbers")
    if scores.softcap or scores.sinks is not None:
        raise Miss(f"{what}, with {'a soft-cap' if scores.softcap else 'sinks'}: no kernel on npu has both")
    if m is not None and m.meta["needs_grad"]:
        raise Miss(f"{what}, with an additive mask that needs a gradient: no operator has both")
    if not 0 < scores.p < 1:
        raise Miss(f"{what}: everything is dropped")
    arguments = (*qkv, m, causal, scores.scale, window, scores.p)
    kernel, reasons = attention_seeded.choose("npu", fx.map_arg(arguments, match.value), {})
    if kernel is None:
        raise Miss(f"{what}: {'; '.join(reasons)}")
    new = rewrite.insert(gm, root, attention_seeded.overload, arguments)
    out = rewrite.insert(gm, root, match.operator.getitem, (new, 0))
    if visible_rows is not None:
        out = fully_masked_rows.with_means(gm, root, out, visible_rows, qkv[2])
    return _without_drop(gm, root, scores, put(gm, root, scores, out))


def _without_drop(gm: fx.GraphModule, root: fx.Node, scores: Scores, region: list[fx.Node]) -> list[fx.Node]:
    """Erases the model's dropout, which drawing makes look alive."""
    if scores.drop is not root:
        scores.drop.replace_all_uses_with(scores.drop.args[0])
    gm.graph.erase_node(scores.drop)
    return region


def _emit_dropout(
    gm: fx.GraphModule,
    root: fx.Node,
    scores: Scores,
    qkv: tuple,
    m: fx.Node | None,
    visible_rows: fx.Node | None,
    causal: bool,
    window: int,
    name: str,
    generated: bool,
    uniform: bool,
) -> list[fx.Node]:
    """``mindspeed::attention_dropout`` in the place of ``root``, its mask drawn where the model drops."""
    (q, k, _), drop, p = (match.value(x) for x in qkv), scores.drop, scores.p
    what = f"dropout of {p} on the attention weights"
    rows, keys = q.shape[2], k.shape[2]
    if scores.sinks is not None:
        raise Miss(f"{what} with sinks: no kernel on cpu has both")
    if m is not None and m.meta["needs_grad"]:
        raise Miss(f"{what}, with an additive mask that needs a gradient: no operator has both")
    if visible_rows is not None and causal:
        raise Miss(
            f"{what}, with rows that a mask hides whole beside a causal one: the model drops weights of keys that the "
            "kernel does not see"
        )
    if not all(isinstance(n, int) for n in (*q.shape, rows, keys)):
        raise Miss(f"{what}: the kernel takes fixed sequence lengths of queries and keys only")
    least = DROPOUT_ROWS if m is None or q.dtype.itemsize < 4 else DROPOUT_MASKED_ROWS
    if generated and rows < least:
        raise Miss(
            f'{what}: generated code is as fast below {least} rows, and here are {rows}; put "{name}" in enable to '
            "fuse all the same"
        )
    if not 0 < p < 1:
        raise Miss(f"{what}: everything is dropped")
    shape = [*q.shape[:2], rows, keys]
    weights = shape if drop is root else list(match.value(drop).shape)
    if drop is not root and (
        not match.value(drop.args[0]).is_contiguous() or match.value(drop).numel() != math.prod(shape)
    ):
        raise Miss(f"{what}: the weights are not stored row by row, so that other numbers would be drawn")
    if visible_rows is not None:
        qkv, m = _with_uniform_rows(gm, root, qkv, m, visible_rows)
    settings = (m, causal, scores.scale, window, scores.softcap, p)
    if generated:
        fake = match.value(qkv[0]).new_empty(shape, dtype=torch.bool)
        kernel, reasons = attention_dropout.choose("cpu", fx.map_arg((*qkv, fake, *settings), match.value), {})
        if kernel is None:
            raise Miss(f"{what}: {'; '.join(reasons)}")
    keep = _kept(gm, drop, weights, p, uniform)  # whoever draws comes after the last refusal
    keep = keep if weights == shape else rewrite.insert(gm, root, aten.reshape.default, (keep, shape))
    both = rewrite.insert(gm, root, attention_dropout.overload, (*qkv, keep, *settings))
    return _without_drop(
        gm, root, scores, put(gm, root, scores, rewrite.insert(gm, root, match.operator.getitem, (both, 0)))
    )


def _kept(gm: fx.GraphModule, drop: fx.Node, shape: list[int], p: float, uniform: bool) -> fx.Node:
    """True, or 1, where the model keeps a weight, of the numbers that its dropout draws: ATen's own, or ``uniform``
    ones as in generated code, which makes them in vectors and is slow with bools (partition/masks.py)."""
    device = match.value(drop).device
    if uniform:
        numbers = rewrite.insert(gm, drop, aten.rand.default, (shape,), {"dtype": torch.float32, "device": device})
        keep = rewrite.insert(gm, drop, aten.gt.Scalar, (numbers, p))
        return functools.reduce(
            lambda x, dtype: rewrite.insert(gm, drop, aten.to.dtype, (x, dtype)), (torch.float32, torch.uint8), keep
        )
    empty = rewrite.insert(gm, drop, aten.empty.memory_format, (shape,), {"dtype": torch.bool, "device": device})
    return rewrite.insert(gm, drop, aten.bernoulli.p, (empty, 1 - p))


def _with_uniform_rows(
    gm: fx.GraphModule, root: fx.Node, qkv: tuple, m: fx.Node, visible_rows: fx.Node
) -> tuple[tuple, fx.Node]:
    """Queries, keys, values and mask with which the rows that a mask hides whole, whose scores the model sets to one
    number, have scores of zero: the weights are uniform as well, and queries and keys get no gradient."""
    q, k, v = qkv
    q = rewrite.insert(gm, root, aten.where.ScalarOther, (visible_rows, q, 0.0))
    if match.value(m).dtype != torch.bool:
        m = rewrite.insert(gm, root, aten.where.ScalarOther, (visible_rows, m, 0.0))
    return (q, k, v), m
