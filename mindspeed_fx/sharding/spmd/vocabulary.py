"""A vocabulary that is divided over ranks: embedding and cross-entropy without ever gathering logits or embedding.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3. The embedding's ranks sum their rows; the cross-entropy exchanges
two numbers per token after the largest: the sum of exponentials and the target's logit, in one all-reduce. The same
exchange serves the linear layer and the cross-entropy in chunks, where not even a rank's own logits are whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from mindspeed_fx.compat import dtensor
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.kernels.linear_logsumexp import ELSEWHERE, IGNORED, INVALID
from mindspeed_fx.sharding.spmd.parts import whole


def divided_mesh_dims(x: DTensor, dim: int) -> list[int]:
    """The mesh dimensions over which dimension ``dim`` of ``x`` is divided."""
    return [i for i, p in enumerate(x.placements) if isinstance(p, Shard) and p.dim == dim]


def embedding(
    weight: DTensor, ids: DTensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> DTensor:
    """``aten.embedding``; with rows of ``weight`` divided, a partial sum to which each rank gives the tokens it has
    rows for.
    """
    over = divided_mesh_dims(weight, 0)
    if not over or scale_grad_by_freq or sparse:
        return torch.ops.aten.embedding(weight, ids, padding_idx, scale_grad_by_freq, sparse)
    ids = ids.redistribute(placements=[Replicate() if i in over else p for i, p in enumerate(ids.placements)])
    # Each rank's gradient is of its own tokens: a sum wherever the tokens are divided.
    gradient = [
        Partial() if p.is_replicate() and q.is_shard() else p for p, q in zip(weight.placements, ids.placements)
    ]
    local, own = weight.to_local(grad_placements=gradient), ids.to_local()
    index, mine = _own(own, whole(torch.arange(weight.shape[0], device=own.device), weight), over)
    padding = torch.where(mine, own == padding_idx, False) if padding_idx >= 0 else None
    rows = F.embedding(index, local)
    if padding is not None:
        rows = torch.where(padding.unsqueeze(-1), rows.detach(), rows)
    out = _merge([Partial() if i in over else p for i, p in enumerate(ids.placements)], weight)
    rows = torch.where(mine.unsqueeze(-1), rows, 0)  # whose gradient there may be no number
    return DTensor.from_local(rows, weight.device_mesh, out, run_check=False)


def _merge(placements: list[Placement], weight: DTensor) -> list[Placement]:
    last = [Shard(2) if isinstance(p, Shard) and p.dim == 1 else None for p in weight.placements]
    return [q or p for p, q in zip(placements, last)]


def _own(index: torch.Tensor, rows: DTensor, over: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index into this rank's rows, and whether it has that row."""
    mine = rows.redistribute(
        placements=[Shard(0) if i in over else Replicate() for i in range(rows.device_mesh.ndim)]
    ).to_local()
    own = (index >= mine[0]) & (index <= mine[-1])
    return torch.where(own, index - mine[0], 0), own


def _counts(device: torch.device, rows: int, classes: int, like: DTensor, over: list[int]) -> torch.Tensor:
    """bool [own rows]: which of this rank's rows are classes, and no padding behind them."""
    placements = [Shard(0) if i in over else Replicate() for i in range(like.device_mesh.ndim)]
    return whole(torch.arange(rows, device=device) < classes, like).redistribute(placements=placements).to_local()


def cross_entropy(
    logits: DTensor, target: DTensor, ignore_index: int, label_smoothing: float, classes: int | None = None
) -> tuple[DTensor, DTensor]:
    """``mindspeed::cross_entropy``, also of logits [tokens, vocab] whose classes are divided.

    Args:
        classes: so many of them count; what is behind is padding.
    """
    over = divided_mesh_dims(logits, 1)
    if not over:
        return torch.ops.mindspeed.cross_entropy(logits, target, ignore_index, label_smoothing)
    mesh, tokens = (
        logits.device_mesh,
        [Replicate() if i in over or p.is_partial() else p for i, p in enumerate(logits.placements)],
    )
    logits = logits.redistribute(
        placements=[p if i in over else q for i, (p, q) in enumerate(zip(logits.placements, tokens))]
    )
    target = target.redistribute(placements=tokens).to_local()
    rows, classes = logits.shape[1], classes or logits.shape[1]
    local = logits.to_local()
    wide = local.to(accumulation_dtype(local.dtype))
    padding = None
    if classes < rows:
        padding = ~_counts(wide.device, rows, classes, logits, over)
        wide = wide.masked_fill(padding, float("-inf"))

    top = _over_ranks(wide.detach().amax(-1), "max", mesh, tokens, over)
    index, own = _own(
        target.where(target != ignore_index, -1), whole(torch.arange(rows, device=local.device), logits), over
    )
    picked = torch.where(own, wide.gather(-1, index.unsqueeze(-1)).squeeze(-1) - top, 0.0)
    numbers = [(wide - top.unsqueeze(-1)).exp().sum(-1), picked]
    if label_smoothing:
        below = wide - top.unsqueeze(-1)
        numbers.append((below if padding is None else below.masked_fill(padding, 0.0)).sum(-1))
    exponentials, picked, *total = _over_ranks(torch.stack(numbers), "sum", mesh, tokens, over).unbind(0)
    below = exponentials.log()
    loss = below - picked
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (below - total[0] / classes)
    loss = loss.where(target != ignore_index, 0.0)
    return tuple(DTensor.from_local(x, mesh, tokens, run_check=False) for x in (loss, below + top))


def _over_ranks(
    x: torch.Tensor, operation: str, mesh: DeviceMesh, tokens: list[Placement], over: list[int]
) -> torch.Tensor:
    """``x`` [..., tokens] of each rank combined over the mesh dimensions ``over``; its gradient is whole on every
    rank.
    """
    parts = [
        Partial(operation) if i in over else (Shard(x.ndim - 1) if p.is_shard() else p) for i, p in enumerate(tokens)
    ]
    result = DTensor.from_local(x, mesh, parts, run_check=False)
    return result.redistribute(placements=[Replicate() if i in over else p for i, p in enumerate(parts)]).to_local()


def linear_cross_entropy(
    hidden: DTensor,
    weight: DTensor,
    bias: DTensor | None,
    target: DTensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    classes: int | None = None,
) -> DTensor:
    """``mindspeed::linear_cross_entropy``; a mean divides by the number of tokens that count on all ranks.

    Args:
        classes: see :func:`cross_entropy`.
    """
    settings = (ignore_index, label_smoothing, z_loss, softcap)
    if divided_mesh_dims(weight, 0):
        losses = _losses(hidden, weight, bias, target, *settings, classes or weight.shape[0])
        if reduction == "none":
            return losses
        total = losses.sum()
    elif reduction == "none":
        return torch.ops.mindspeed.linear_cross_entropy(hidden, weight, bias, target, *settings, reduction)
    else:
        total = torch.ops.mindspeed.linear_cross_entropy(hidden, weight, bias, target, *settings, "sum")
    return total if reduction == "sum" else total / (target != ignore_index).sum().to(total.dtype)


def _first_rows(x: torch.Tensor, own: list[int], mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's rows without the padding behind them; at least one."""
    return x.narrow(0, 0, dtensor.by_coordinate(mesh, dim, lambda place: max(1, own[place])))


def _at(x: DTensor, placements: list[Placement]) -> DTensor:
    """``x`` at ``placements``. Where it is, ``redistribute`` would sum a partial gradient that its producer wants
    scattered.
    """
    return x if list(x.placements) == placements else x.redistribute(placements=placements)


def _losses(
    hidden: DTensor,
    weight: DTensor,
    bias: DTensor | None,
    target: DTensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    classes: int,
) -> DTensor:
    """Loss of each token where the ``classes`` of ``weight`` are divided: each rank has chunks of its own logits, of
    the rows that are no padding."""
    over, mesh = divided_mesh_dims(weight, 0), weight.device_mesh
    tokens = [p if i not in over and p == Shard(0) else Replicate() for i, p in enumerate(hidden.placements)]
    held = [Shard(0) if i in over else Replicate() for i in range(mesh.ndim)]
    # Each rank gives the gradient of hidden its classes' share, and those of its classes its tokens' share.
    summed_hidden = [Partial() if i in over else p for i, p in enumerate(tokens)]
    summed_rows = [Partial() if p.is_replicate() and q.is_shard() else p for p, q in zip(held, tokens)]
    x = _at(hidden, tokens).to_local(grad_placements=summed_hidden)
    w, b = (None if t is None else _at(t, held).to_local(grad_placements=summed_rows) for t in (weight, bias))
    target = target.redistribute(placements=tokens).to_local()
    has_any = None
    if classes < weight.shape[0]:
        length = weight.shape[0] // mesh.size(over[0])
        own_classes = [min(length, classes - place * length) for place in range(mesh.size(over[0]))]
        w, b = (None if t is None else _first_rows(t, own_classes, mesh, over[0]) for t in (w, b))
        if own_classes[-1] <= 0:
            has_any = dtensor.entry_by_coordinate(mesh, over[0], [n > 0 for n in own_classes], target.device)
    index, own = _own(target, whole(torch.arange(weight.shape[0], device=target.device), weight), over)
    index = torch.where(own, index, torch.where((target >= 0) & (target < classes), ELSEWHERE, INVALID))
    counts = target != ignore_index
    lse, picked, sums = torch.ops.mindspeed.linear_logsumexp(
        x, w, b, torch.where(counts, index, IGNORED), softcap, bool(label_smoothing)
    )
    if has_any is not None:
        lse, sums = lse.where(has_any, float("-inf")), sums.where(has_any, 0.0)
    top = _over_ranks(lse.detach(), "max", mesh, tokens, over)
    numbers = [(lse - top).exp(), picked, *([sums] if label_smoothing else [])]
    exponentials, picked, *total = _over_ranks(torch.stack(numbers), "sum", mesh, tokens, over).unbind(0)
    lse = top + exponentials.log()
    loss = lse - (1 - label_smoothing) * picked - (label_smoothing * total[0] / classes if label_smoothing else 0.0)
    if z_loss:
        loss = loss + z_loss * lse * lse
    return DTensor.from_local(loss.where(counts, 0.0), mesh, tokens, run_check=False)
