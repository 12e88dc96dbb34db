"""Ring attention: queries, keys and values divided by sequence; keys and values pass from rank to rank while attention
is computed.

Source: Liu et al. 2023, "Ring Attention"; the balance is Megatron's zig-zag: the sequence is cut into two chunks per
rank, and while it is in attention, rank r of n works on chunks r and 2n-1-r. After its own keys a rank then computes
two blocks of a chunk by a chunk with the keys of every other rank: the same number of scores on every rank in every
step, and no mask. Elsewhere the sequence stays divided in order, so that nothing else of the model needs to know.

With a mask or a window there is no ring: :mod:`mindspeed_fx.sharding.spmd.block_schedule` says which rank computes
    what, and :mod:`ring_blocks` does it.

The next keys and values are sent before this step's attention, and waited for after it. The backward sends them round
again, and the gradients of keys and values with them, a step behind; what it needs besides is the log-sum-exp over all
keys.

With a window of w ranks there are two rings (Gu et al. 2024, "LoongTrain": double-ring attention; MindSpeed's
cp-window-size): keys and values go round w neighbours, an inner ring, and while they do, those that the round began
with are on their way to the next window, so that a message between machines has w steps of attention to hide behind
instead of one. Gradients go round the inner ring, and their sums from window to window, a round behind.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from mindspeed_fx.compat import tracing
from mindspeed_fx.kernels.attention import stored_bsnd
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd import ring_dropout
from mindspeed_fx.sharding.spmd.block_schedule import PER_RANK, BlockSchedule, best, needed_blocks
from mindspeed_fx.sharding.spmd.ring_blocks import Exchange, ScheduledAttention, sinks_gradient, with_sinks
from mindspeed_fx.sharding.spmd.ring_messages import (
    KeptKeys,
    Ring,
    RotatingGradients,
    RotatingKeys,
    in_parts,
    take_half,
)

ops = torch.ops.mindspeed

NO_KEY = -1e30
"""Log-sum-exp of a row that has seen no key yet; finite, so that two of them may be merged."""


def over(q: DTensor, k: DTensor, v: DTensor) -> int | None:
    """The mesh dimension over which the sequences of q, k and v [batch, heads, sequence, dim] are divided; None: they
    are not.

    Raises:
        ShardingError: over several, as if one ring went through two mesh dimensions.
    """
    results = [
        i
        for i, placed in enumerate(zip(q.placements, k.placements, v.placements))
        if all(p == Shard(2) for p in placed) and q.device_mesh.size(i) > 1
    ]
    if len(results) > 1:
        names = q.device_mesh.mesh_dim_names
        raise ShardingError(
            "ring attention goes round one mesh dimension, and the sequence is divided over "
            f"{', '.join(names[i] for i in results)}"
        )
    return results[0] if results else None


def attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    dim: int,
    mask: DTensor | None,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: DTensor | None = None,
    known: Tensor | None = None,
    inner: int = 0,
) -> DTensor:
    """The result of ``mindspeed::attention``, the sequences of all three divided over mesh dimension ``dim``.

    Without a mask and a window a ring; else by :mod:`ring_blocks`, which leaves out the blocks that a window empties,
    or ``known``.

    Args:
        known: the mask's values where they are known while compiling: broadcast to [queries, keys], True where any head
            attends.
        inner: ranks of an inner ring; 0: there is one ring. No matter where there is none.

    Raises:
        ShardingError: queries and keys of different lengths, causal without a mask and a rank's part of odd length,
            windows that do not divide the ranks, an additive mask that needs a gradient, a sink for each query, or a
            mask or window where the length is a symbol.
    """
    _check(q, k, mask, sinks)
    size = q.shape[2]
    ranks = q.device_mesh.size(dim)
    local = [x.to_local(grad_placements=_gradient(x, q, 0)) for x in (k, v)]
    sinks = None if sinks is None else _placed_like(sinks, q, {1: 0})
    local.append(None if sinks is None else sinks.to_local(grad_placements=_gradient(sinks, q, 1)))
    if mask is None and not window:
        if causal and size % (2 * ranks):
            raise ShardingError(
                f"causal ring attention cuts the sequence into two chunks per rank: {size} elements do not divide into "
                f'{2 * ranks}, for {ranks} ranks of "{q.device_mesh.mesh_dim_names[dim]}"'
            )
        if inner and ranks % inner:
            raise ShardingError(
                f"an inner ring of {inner} ranks does not divide the {ranks} of mesh dimension "
                f'"{q.device_mesh.mesh_dim_names[dim]}"; valid: '
                f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
            )
        result = Ring(q.device_mesh, dim, ranks, causal, scale, softcap, inner or ranks)
        result.announced(q, k, v)
        out = RingAttention.apply(q.to_local(), *local, None, None, result)
    else:
        if isinstance(size, torch.SymInt):
            raise ShardingError(
                "attention with a mask or a window over a divided sequence takes fixed sizes: torch.compile(..., "
                "dynamic=False) compiles once for each size, so pad batches to a few (as examples/train_hf.py "
                "--buckets does)"
            )
        schedule = schedule_for(size, ranks, causal, window, known)
        factor = Exchange(
            q.device_mesh, dim, ranks, size // (ranks * schedule.per_rank), schedule, causal, window, scale, softcap
        )
        factor.announced(q, k, v)
        whole = None if mask is None else _placed_like(mask[(None,) * (4 - mask.ndim)], q, {0: 0, 1: 1}).to_local()
        out = ScheduledAttention.apply(q.to_local(), *local[:2], whole, local[2], factor)
    b, n, s, _ = q.shape
    stored = torch.empty((b, s, n, v.shape[3]), device="meta").transpose(
        1, 2
    )  # as mindspeed::attention stores its result
    return DTensor.from_local(
        stored_bsnd(out), q.device_mesh, q.placements, run_check=False, shape=stored.shape, stride=stored.stride()
    )


def _check(q: DTensor, k: DTensor, mask: DTensor | None, sinks: DTensor | None) -> None:
    if mask is not None and mask.requires_grad:
        raise ShardingError(
            "attention over a divided sequence gives an additive mask no gradient; divide heads or the batch"
        )
    if sinks is not None and sinks.ndim > 1:
        raise ShardingError(
            "attention over a divided sequence takes one sink for each head, and here is one for each query; divide "
            "heads or the batch"
        )
    if k.shape[2] != q.shape[2]:
        raise ShardingError(f"ring attention needs as many queries as keys; here {q.shape[2]} and {k.shape[2]}")


def _gradient(x: DTensor, q: DTensor, keep: int) -> list[Placement]:
    """What a rank's gradient of ``x`` is. Heads or rows of queries that are divided where x is not: the part that they
    have in it.
    """
    return [
        Partial() if p.is_replicate() and mine.is_shard() and not (keep and mine == Shard(keep)) else p
        for p, mine in zip(x.placements, q.placements)
    ]


def _placed_like(x: DTensor, q: DTensor, dims: dict[int, int]) -> DTensor:
    """``x`` divided as ``q`` is along the dimensions of ``dims`` (of q: of x), and whole along all others."""
    results = [dims.get(p.dim) if isinstance(p, Shard) else None for p in q.placements]
    return x.redistribute(placements=[Replicate() if d is None or x.shape[d] == 1 else Shard(d) for d in results])


def schedule_for(size: int, ranks: int, causal: bool, window: int, known: Tensor | None) -> BlockSchedule:
    """Who computes which blocks of a sequence of ``size`` elements on ``ranks`` ranks."""
    per_rank = max(n for n in PER_RANK if size // ranks % n == 0)
    blocks = ranks * per_rank
    rows = size // blocks
    need = needed_blocks(blocks, rows, causal, window)
    if known is not None:
        with tracing.outside_tracing():
            existing = (
                known.expand(size, size)
                .unflatten(1, (blocks, rows))
                .any(2)
                .unflatten(0, (blocks, rows))
                .any(1)
                .tolist()
            )
        need = tuple(tuple(a and b for a, b in zip(*lines)) for lines in zip(need, existing))
    return best(need, ranks, rows)


def _take_chunks(x: Tensor, numbers: Sequence[int]) -> Tensor:
    """Two chunks of x [batch, heads, sequence, dim], one behind the other along the batch. The first one is the same on
    every rank and is taken by another operator than the second: where both are equal, one rank's graph would else have
    a node less. The second is taken by its number, for where it begins may be a symbol on one rank alone."""
    return torch.cat([x.chunk(2, 2)[numbers[0]], take_half(x, numbers[1], 2)])


def _take_biases(bias: Tensor | None, numbers: Sequence[int], batch: int) -> Tensor | None:
    """Of what is added for each key, [1, heads, 1, keys], the two chunks, as :func:`_take_chunks` takes the keys."""
    if bias is None:
        return None
    chunks = (bias.chunk(2, 3)[numbers[0]], take_half(bias, numbers[1], 3))
    return torch.cat([chunk.expand(batch, -1, -1, -1) for chunk in chunks])


def _put(x: Tensor, chunk: Tensor, number: int) -> Tensor:
    return in_parts(x, 2, 2).select_scatter(chunk, 2, number).flatten(2, 3)


class RingAttention(torch.autograd.Function):
    """On local tensors, [batch, heads, sequence / ranks, dim], with a mask whose columns are in the order of the ranks
    that hold the keys: for a ring that is not causal that of a rank's own rows, [batch or 1, heads or 1, sequence /
    ranks, sequence], True where attention is allowed or what is added to scores; for a causal ring what is added for
    each key, [1, heads, 1, sequence]. Every row sees a key. With dropout ``keep``, bool [batch, heads, sequence /
    ranks, sequence], has its columns in the same order. The graphs of all ranks differ in numbers alone, so that what
    is decided about them (saving, order) is the same everywhere."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        keep: Tensor | None,
        ring: Ring,
    ) -> Tensor:
        q, k, v = ring.balanced(q, k, v)
        keys, travel = (k, v), RotatingKeys(ring, k, v)
        out, lse = _attention(q, k, v, ring.mask_for(mask, 0, 0), ring.mask_for(keep, 0, 0), ring)
        out = out.to(accumulation_dtype(q.dtype))
        for at in ring.steps():
            k, v = travel.on(*at)
            keys += ring.kept(k, v)
            if not ring.causal:
                block = _attention(q, k, v, ring.mask_for(mask, *at), ring.mask_for(keep, *at), ring)
                out, lse = ops.ring_attention_update(out, lse, *block)
                continue
            rows, columns = zip(*ring.blocks(*at))
            blocks = _attend(
                _take_chunks(ring.of_step(q, *at), rows),
                _take_chunks(k, columns),
                _take_chunks(v, columns),
                _take_biases(ring.mask_for(mask, *at), columns, q.shape[0]),
                ring_dropout.take_blocks(ring.mask_for(keep, *at), rows, columns),
                False,
                ring,
            )
            for number, block, block_lse in zip(rows, *(x.chunk(2) for x in blocks)):
                before = take_half(out, number, 2), take_half(lse, number, 2)
                new, new_lse = ops.ring_attention_update(*before, block, block_lse)
                out, lse = _put(out, new, number), _put(lse, new_lse, number)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out, ctx.ring = out.to(q.dtype), ring
        ctx.save_for_backward(q, out, lse, sinks, mask, keep, *keys)
        return ring.restored(out)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring, (q, out, lse, sinks, mask, keep, k, v, *kept) = ctx.ring, ctx.saved_tensors
        dtypes, wide = (k.dtype, v.dtype), accumulation_dtype(q.dtype)
        (grad,) = ring.balanced(grad)
        travel, home = KeptKeys(ring, k, v, kept), RotatingGradients(ring)
        own, kept_own = ring.mask_for(mask, 0, 0), ring.mask_for(keep, 0, 0)
        dq, *gradients = (
            g.to(wide) for g in _attend_backward(grad, q, k, v, out, lse, own, kept_own, ring.causal, ring)
        )
        for at in ring.steps():
            behind = home.sent(
                gradients, *at
            )  # arrive, as the keys that they belong to did, while this step is computed
            k, v = travel.on(*at)
            if ring.causal:
                rows, columns = zip(*ring.blocks(*at))
                own_rows = [_take_chunks(ring.of_step(x, *at), rows) for x in (grad, q, out, lse)]
                own_keys = [_take_chunks(x, columns) for x in (k, v)]
                arguments = [*own_rows[:2], *own_keys, *own_rows[2:]]
                biases = _take_biases(ring.mask_for(mask, *at), columns, q.shape[0])
                dropped = ring_dropout.take_blocks(ring.mask_for(keep, *at), rows, columns)
                blocks = _attend_backward(*arguments, biases, dropped, False, ring)
                before = behind() or [torch.zeros_like(g) for g in gradients]
                dq, *gradients = (
                    _add_chunks(x, numbers, b) for x, numbers, b in zip((dq, *before), (rows, columns, columns), blocks)
                )
            else:
                allowed, dropped = ring.mask_for(mask, *at), ring.mask_for(keep, *at)
                blocks = _attend_backward(grad, q, k, v, out, lse, allowed, dropped, False, ring)
                dq, *gradients = (
                    b.to(wide) if x is None else x + b for x, b in zip((dq, *(behind() or [None, None])), blocks)
                )
        dk, dv = home.arrived(gradients)
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return *ring.restored(dq.to(q.dtype), dk.to(dtypes[0]), dv.to(dtypes[1])), dsinks, None, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor | None, causal: bool, ring: Ring
) -> tuple[Tensor, Tensor]:
    if keep is None:
        return ops.attention(q, k, v, mask, causal, ring.scale, 0, ring.softcap)
    return ring_dropout.attention(q, k, v, mask, keep, causal, ring.scale, ring.dropout)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    causal: bool,
    ring: Ring,
) -> tuple[Tensor, ...]:
    if keep is None:
        return ops.attention_backward(grad, q, k, v, out, lse, mask, causal, ring.scale, 0, ring.softcap)
    return ring_dropout.attention_backward(grad, q, k, v, out, lse, mask, keep, causal, ring.scale, ring.dropout)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor | None, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Attention to one rank's keys, and its log-sum-exp: :data:`NO_KEY` for a row that sees none of them."""
    out, lse = _attend(q, k, v, mask, keep, ring.causal, ring)
    if mask is None or ring.causal:
        return out, lse
    allowed = mask if mask.dtype == torch.bool else mask > -math.inf
    seen = allowed.any(-1)  # what kernels say of rows without any key differs: ATen's flash kernel on CPU says 0
    return torch.where(seen.unsqueeze(-1), out, 0.0), torch.where(seen, lse, NO_KEY)


def _add_chunks(x: Tensor, numbers: Sequence[int], blocks: Tensor) -> Tensor:
    for number, block in zip(numbers, blocks.chunk(2)):
        x = _put(x, take_half(x, number, 2) + block, number)
    return x
