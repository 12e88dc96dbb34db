"""Every loss and reduction of torch, with its arguments, as functions of a small model's values (loss_model.py): what
test_losses.py and divided_losses.py run under every plan."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sharding.loss_model import CASES, CLASSES, ROWS, SEQ, WIDTH, _each, case, flat, sign, valid, weights

__all__ = ["CASES"]

# ------------------------------------------------------------------ losses by element
_each("mse_loss", lambda v, r: F.mse_loss(v.h, v.y, reduction=r))
_each("mse_loss weight", lambda v, r: F.mse_loss(v.h, v.y, reduction=r, weight=v.y.square() + 0.1), "mean", "sum")
_each("mse_loss of rows", lambda v, r: F.mse_loss(v.h.flatten(0, 1), v.y.flatten(0, 1), reduction=r))
_each(
    "mse_loss of its own mean", lambda v, r: F.mse_loss(v.h, v.h.mean(-1, keepdim=True).expand(v.h.shape), reduction=r)
)
_each("l1_loss", lambda v, r: F.l1_loss(v.h, v.y, reduction=r))
_each("smooth_l1_loss", lambda v, r: F.smooth_l1_loss(v.h, v.y, reduction=r, beta=0.7))
_each("huber_loss", lambda v, r: F.huber_loss(v.h, v.y, reduction=r, delta=0.7))
_each("binary_cross_entropy", lambda v, r: F.binary_cross_entropy(v.h.sigmoid(), v.y.sigmoid(), reduction=r))
_each(
    "binary_cross_entropy weight",
    lambda v, r: F.binary_cross_entropy(v.h.sigmoid(), v.y.sigmoid(), v.y.abs(), reduction=r),
)
_each("bce_with_logits", lambda v, r: F.binary_cross_entropy_with_logits(v.h, v.y.sigmoid(), reduction=r))
_each(
    "bce_with_logits weight, pos_weight",
    lambda v, r: F.binary_cross_entropy_with_logits(
        v.logits, F.one_hot(valid(v), CLASSES).to(v.h.dtype), weights(v), reduction=r, pos_weight=weights(v) + 1
    ),
)
_each("kl_div", lambda v, r: F.kl_div(v.logits.log_softmax(-1), v.logits.detach().square().softmax(-1), reduction=r))
_each("kl_div batchmean", lambda v, r: F.kl_div(v.h.log_softmax(-1), v.y.softmax(-1), reduction=r), "batchmean")
_each(
    "kl_div log_target",
    lambda v, r: F.kl_div(v.h.log_softmax(-1), v.y.log_softmax(-1), reduction=r, log_target=True),
    "batchmean",
    "mean",
    "sum",
)
_each("poisson_nll_loss", lambda v, r: F.poisson_nll_loss(v.h, v.y.abs(), reduction=r))
_each(
    "poisson_nll_loss full",
    lambda v, r: F.poisson_nll_loss(v.h.exp(), v.y.abs() * 3, log_input=False, full=True, reduction=r),
)
_each("gaussian_nll_loss", lambda v, r: F.gaussian_nll_loss(v.h, v.y, v.h.square() + 0.1, full=True, reduction=r))
_each("hinge_embedding_loss", lambda v, r: F.hinge_embedding_loss(v.h, sign(v), 0.5, reduction=r))
_each("margin_ranking_loss", lambda v, r: F.margin_ranking_loss(v.h, v.h.square(), sign(v), 0.1, reduction=r))
_each("soft_margin_loss", lambda v, r: F.soft_margin_loss(v.h, sign(v), reduction=r))


# ------------------------------------------------------------------ losses by row
def log_probabilities(v: Any) -> tuple[Tensor, Tensor]:
    logits, labels = flat(v)
    return logits.log_softmax(-1), labels


_each("nll_loss", lambda v, r: F.nll_loss(*log_probabilities(v), reduction=r))
_each("nll_loss weight", lambda v, r: F.nll_loss(*log_probabilities(v), weights(v), reduction=r))
_each(
    "nll_loss weight, ignore_index",
    lambda v, r: F.nll_loss(
        v.logits.flatten(0, 1).log_softmax(-1), valid(v).flatten(), weights(v), ignore_index=0, reduction=r
    ),
)
_each(
    "nll_loss [batch, classes, seq]",
    lambda v, r: F.nll_loss(v.logits.log_softmax(-1).transpose(1, 2), v.labels, weights(v), reduction=r),
)
_each("cross_entropy", lambda v, r: F.cross_entropy(*flat(v), reduction=r))
_each("cross_entropy label_smoothing", lambda v, r: F.cross_entropy(*flat(v), label_smoothing=0.1, reduction=r))
_each("cross_entropy weight", lambda v, r: F.cross_entropy(*flat(v), weights(v), reduction=r))
_each(
    "cross_entropy weight, label_smoothing",
    lambda v, r: F.cross_entropy(*flat(v), weights(v), label_smoothing=0.1, reduction=r),
)
_each(
    "cross_entropy ignore_index",
    lambda v, r: F.cross_entropy(v.logits.flatten(0, 1), valid(v).flatten(), ignore_index=0, reduction=r),
)
_each(
    "cross_entropy [batch, classes, seq]",
    lambda v, r: F.cross_entropy(v.logits.transpose(1, 2), v.labels, weights(v), label_smoothing=0.1, reduction=r),
)
_each(
    "cross_entropy probabilities",
    lambda v, r: F.cross_entropy(
        v.logits.flatten(0, 1), v.logits.flatten(0, 1).detach().sin().softmax(-1), reduction=r
    ),
)
_each(
    "cross_entropy probabilities, weight, smoothing",
    lambda v, r: F.cross_entropy(
        v.h.transpose(1, 2), v.y.softmax(-1).transpose(1, 2), weights(v)[:WIDTH], label_smoothing=0.1, reduction=r
    ),
)
_each(
    "multi_margin_loss",
    lambda v, r: F.multi_margin_loss(v.logits.flatten(0, 1), valid(v).flatten(), weight=weights(v), reduction=r),
)
_each(
    "multilabel_margin_loss",
    lambda v, r: F.multilabel_margin_loss(
        v.h.flatten(0, 1), (v.y > 0).long().flatten(0, 1).cumsum(-1) - 1, reduction=r
    ),
)
_each(
    "multilabel_soft_margin_loss",
    lambda v, r: F.multilabel_soft_margin_loss(v.h, (v.y > 0).to(v.y.dtype), weights(v)[:WIDTH], reduction=r),
)
_each(
    "cosine_embedding_loss",
    lambda v, r: F.cosine_embedding_loss(
        v.h.flatten(0, 1), v.y.flatten(0, 1), sign(v)[..., 0].flatten(), 0.1, reduction=r
    ),
)
_each("triplet_margin_loss", lambda v, r: F.triplet_margin_loss(v.h, v.y, v.h.sin().detach(), reduction=r))
_each("triplet_margin_loss swap", lambda v, r: F.triplet_margin_loss(v.h, v.y, v.h.square(), swap=True, reduction=r))
_each(
    "triplet_margin_with_distance_loss",
    lambda v, r: F.triplet_margin_with_distance_loss(v.h, v.y, v.h.square(), reduction=r),
)


def ctc(v: Any, reduction: str) -> Tensor:
    return F.ctc_loss(
        v.logits.log_softmax(-1).transpose(0, 1),
        valid(v)[:, :3].clamp(min=1),
        (SEQ,) * ROWS,
        (3,) * ROWS,
        reduction=reduction,
    )


_each("ctc_loss", ctc)


# ------------------------------------------------------------------ combined
@case("cross_entropy + mse_loss")
def _(v):
    return F.cross_entropy(*flat(v)) + F.mse_loss(v.h, v.y)


@case("cross_entropy + 0.1 * weighted cross_entropy")
def _(v):
    return F.cross_entropy(*flat(v)) + 0.1 * F.cross_entropy(*flat(v), weights(v))


@case("cross_entropy + sum + mean + max")
def _(v):
    return F.cross_entropy(*flat(v)) + 0.01 * v.h.square().sum() + v.h.abs().mean() + v.h.max()


@case("cross_entropy - entropy")
def _(v):
    return (
        F.cross_entropy(*flat(v))
        - 0.1 * torch.distributions.Categorical(logits=v.logits, validate_args=False).entropy().mean()
    )


@case("product of two losses")
def _(v):
    return F.mse_loss(v.h, v.y) * v.h.sum() / F.cross_entropy(*flat(v))


@case("aux loss of a router")
def _(v):
    probabilities = v.logits.softmax(-1)
    chosen = F.one_hot(probabilities.topk(2, -1).indices, CLASSES).to(v.h.dtype).sum(2)
    return F.cross_entropy(*flat(v)) + CLASSES * (chosen.mean((0, 1)) * probabilities.mean((0, 1))).sum()


@case("z-loss")
def _(v):
    return F.cross_entropy(*flat(v)) + 0.1 * v.logits.logsumexp(-1).square().mean()


@case("z-loss over kept tokens")
def _(v):
    keep = v.keep.to(v.h.dtype)
    return F.cross_entropy(*flat(v)) + 0.1 * (v.logits.logsumexp(-1).square() * keep).sum() / keep.sum()


@case("loss * mask / mask.sum()")
def _(v):
    return (F.cross_entropy(*flat(v), reduction="none") * v.keep.flatten()).sum() / v.keep.sum()


@case("mean by batch row of loss * mask")
def _(v):
    loss = F.cross_entropy(v.logits.transpose(1, 2), v.labels, reduction="none")
    return ((loss * v.keep).sum(1) / v.keep.sum(1)).mean()


@case("shifted labels")
def _(v):
    return F.cross_entropy(v.logits[:, :-1].flatten(0, 1), v.labels[:, 1:].flatten())


@case("shifted logits [batch, classes, seq]")
def _(v):
    return F.cross_entropy(v.logits[:, :-1].transpose(1, 2), v.labels[:, 1:], weights(v))


@case("contrastive")
def _(v):
    a, b = (F.normalize(t.mean(1), dim=-1) for t in (v.h, v.y))
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(ROWS))


@case("two results")
def _(v):
    return F.mse_loss(v.h, v.y), F.cross_entropy(*flat(v), weights(v))


@case("log-probabilities of labels (DPO)")
def _(v):
    picked = v.logits.log_softmax(-1).gather(-1, valid(v).unsqueeze(-1)).squeeze(-1)
    return -F.logsigmoid((picked * v.keep).sum(-1)).mean()


@case("distillation")
def _(v):
    teacher = v.logits.detach().cos() / 2
    return (
        F.kl_div(
            (v.logits / 2).log_softmax(-1).flatten(0, 1),
            teacher.log_softmax(-1).flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        * 4
    )


# ------------------------------------------------------------------ indexing, convolution
@case("logits[mask]")
def _(v):
    return v.logits[v.keep].square().sum()


@case("cross_entropy of logits[mask]")
def _(v):
    return F.cross_entropy(v.logits[v.keep], valid(v)[v.keep])


@case("masked_select")
def _(v):
    return v.h.masked_select(v.y > 0).square().mean()


@case("index by positions")
def _(v):
    return v.logits[torch.arange(ROWS), v.keep.long().sum(1) - 1].square().sum()


@case("index by rows")
def _(v):
    return v.h[:, [1, 3, 6]].square().sum(), v.h[-1].square(), v.h[:, 0].sin(), v.h[:, -1]


@case("index_select")
def _(v):
    return (
        v.h.index_select(1, torch.tensor([0, 5, 5])),
        v.h.index_select(0, torch.tensor([2, 0])),
        v.h.index_select(2, torch.tensor([7])),
    )


@case("scatter_add, index_add")
def _(v):
    zeros = torch.zeros(ROWS, CLASSES, WIDTH, dtype=v.h.dtype)
    index = valid(v).unsqueeze(-1).expand(v.h.shape)
    return zeros.scatter_add(1, index, v.h).square(), torch.zeros(CLASSES, WIDTH, dtype=v.h.dtype).index_add(
        0, valid(v).flatten(), v.h.flatten(0, 1)
    ).square()


@case("masked_scatter, where, index_put")
def _(v):
    keep = v.keep.unsqueeze(-1)
    return (
        v.h.masked_scatter(keep, v.y),
        torch.where(keep, v.h, v.y),
        v.h.masked_fill(keep, 0.5),
        v.h.index_put((v.keep,), torch.tensor(0.3, dtype=v.h.dtype)),
    )


@case("roll, flip, diff, pad, unfold")
def _(v):
    h = v.h
    return (
        h.roll(1, 1),
        h.flip(1),
        h.diff(dim=1),
        h.diff(dim=1, prepend=h[:, :1] - 1, append=h[:, :2]),
        F.pad(h, (0, 0, 1, 2)),
        h.unfold(1, 3, 1),
        h.tril(),
        h.triu(1),
        h.repeat_interleave(2, 1),
        h.repeat(1, 2, 1),
    )


@case("conv1d over the sequence", lambda: nn.Conv1d(WIDTH, 4, 3, padding=1))
def _(v):
    return v.module(v.h.transpose(1, 2)).square().mean()


@case("causal depthwise conv1d", lambda: nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH, bias=False))
def _(v):
    return F.silu(v.module(v.h.transpose(1, 2))[..., :SEQ]).transpose(1, 2)


@case("conv2d", lambda: nn.Conv2d(1, 4, 3, stride=2, padding=1))
def _(v):
    return v.module(v.h.unsqueeze(1)).square().mean()


@case("conv_transpose1d", lambda: nn.ConvTranspose1d(WIDTH, 4, 2, stride=2))
def _(v):
    return v.module(v.h.transpose(1, 2)).sin()


@case("pooling")
def _(v):
    x = v.h.transpose(1, 2)
    return (
        F.avg_pool1d(x, 2),
        F.max_pool1d(x, 2),
        F.adaptive_avg_pool1d(x, 2),
        F.interpolate(x, scale_factor=2.0, mode="linear"),
        F.adaptive_max_pool1d(x, 2),
    )


# ------------------------------------------------------------------ reductions
def _reductions(
    name: str, f: Callable, dims: tuple = (None, 0, 1, 2, (0, 1), (1, 2)), keepdims: tuple = (False, True)
) -> None:
    for dim in dims:
        if dim is None:
            case(f"{name}()")(lambda v: f(v.h))
            continue

        def run(v: Any, dim: Any = dim) -> Any:
            results = [f(v.h, dim=dim, keepdim=k) for k in keepdims]
            return tuple(r for result in results for r in (result if isinstance(result, tuple) else (result,)))

        case(f"{name}(dim={dim})")(run)


ONE = (None, 0, 1, 2)
_reductions("mean", torch.mean)
_reductions("sum", torch.sum)
_reductions("prod", torch.prod, ONE)
_reductions("nansum", lambda x, **k: torch.nansum(torch.where(x > 1, float("nan"), x), **k))
_reductions("nanmean", lambda x, **k: torch.nanmean(torch.where(x > 1, float("nan"), x), **k))
_reductions("var", torch.var)
_reductions("std", torch.std)
_reductions("var biased", lambda x, **k: torch.var(x, unbiased=False, **k))
_reductions("std correction=2", lambda x, dim=None, **k: torch.std(x, dim, correction=2, **k))
_reductions("var_mean", torch.var_mean)
_reductions("norm", lambda x, **k: torch.norm(x, **k))
_reductions("norm p=1", lambda x, **k: torch.norm(x, p=1, **k))
_reductions("vector_norm", torch.linalg.vector_norm)
_reductions("vector_norm inf", lambda x, **k: torch.linalg.vector_norm(x, float("inf"), **k))
_reductions("vector_norm 3", lambda x, **k: torch.linalg.vector_norm(x, 3, **k))
_reductions("vector_norm 0", lambda x, **k: torch.linalg.vector_norm(x, 0, **k))
_reductions("logsumexp", torch.logsumexp, (0, 1, 2, (0, 1), (1, 2)))
_reductions("amax", torch.amax)
_reductions("amin", torch.amin)
_reductions("max", lambda x, **k: tuple(r) if isinstance(r := torch.max(x, **k), tuple) else r, ONE)
_reductions("min", lambda x, **k: tuple(r) if isinstance(r := torch.min(x, **k), tuple) else r, ONE)
_reductions("aminmax", lambda x, **k: tuple(torch.aminmax(x, **k)), ONE)
_reductions("argmax", torch.argmax, ONE)
_reductions("argmin", torch.argmin, ONE)
_reductions("median", lambda x, **k: tuple(r) if isinstance(r := torch.median(x, **k), tuple) else r, ONE)
_reductions("nanmedian", lambda x, **k: tuple(r) if isinstance(r := torch.nanmedian(x, **k), tuple) else r, ONE)
_reductions("quantile", lambda x, **k: torch.quantile(x, 0.3, **k), ONE)
_reductions("mode", lambda x, **k: tuple(torch.mode((x * 2).round(), **k)), (0, 1, 2))
_reductions("any", lambda x, **k: (x > 1).any(**k), ONE)
_reductions("all", lambda x, **k: (x > -1).all(**k), ONE)
_reductions("count_nonzero", lambda x, dim=None, keepdim=False: torch.count_nonzero(x > 0, dim=dim), keepdims=(False,))
_reductions("kthvalue", lambda x, **k: tuple(torch.kthvalue(x, 3, **k)), (0, 1, 2))
for _name in (
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "softmax",
    "log_softmax",
    "cummax",
    "cummin",
    "sort",
    "argsort",
    "topk",
    "softmin",
):

    def _along(v: Any, dim: int, f: Callable) -> Any:
        result = f(v.h, dim)
        return tuple(result) if isinstance(result, tuple) else result

    _f = {
        "topk": lambda x, d: x.topk(3, d),
        "sort": lambda x, d: x.sort(dim=d, descending=True),
        "softmin": F.softmin,
    }.get(_name) or getattr(torch, _name)
    for _dim in (0, 1, 2):
        case(f"{_name}(dim={_dim})")(lambda v, d=_dim, f=_f: _along(v, d, f))
case("softmax of logits")(lambda v: v.logits.softmax(-1))
case("log_softmax of logits")(lambda v: v.logits.log_softmax(-1))
case("softmax of logits in float32")(lambda v: v.logits.softmax(-1, dtype=torch.float32))
case("argmax of logits")(lambda v: (v.logits.argmax(-1), (v.logits.argmax(-1) == v.labels).sum()))
case("max of logits")(lambda v: tuple(v.logits.max(-1)))
case("topk of logits")(lambda v: tuple(v.logits.topk(3)))
case("norm of logits")(lambda v: v.logits.norm(dim=-1))
case("var of logits")(lambda v: v.logits.var(-1))
case("histc")(lambda v: v.h.detach().histc(5))
case("bincount")(
    lambda v: (
        torch.bincount(valid(v).flatten(), minlength=CLASSES),
        torch.bincount(valid(v).flatten(), v.y[..., 0].flatten(), CLASSES),
    )
)
case("unique")(lambda v: torch.unique(valid(v)))
case("unique counts")(lambda v: torch.unique(valid(v), return_inverse=True, return_counts=True))
case("nonzero")(lambda v: v.keep.nonzero())
case("dist, cdist, pdist")(lambda v: (torch.dist(v.h, v.y), torch.cdist(v.h, v.y), F.pdist(v.h[:, 0])))
case("cosine_similarity, pairwise_distance")(
    lambda v: (F.cosine_similarity(v.h, v.y, -1), F.cosine_similarity(v.h, v.y, 1), F.pairwise_distance(v.h, v.y))
)
case("cov, corrcoef")(lambda v: (torch.cov(v.h.flatten(0, 1).t()), torch.corrcoef(v.h[:, :, 0])))
case("trace, det, outer")(
    lambda v: (
        v.h[0].trace(),
        torch.logdet(v.h @ v.h.transpose(1, 2) + torch.eye(SEQ, dtype=v.h.dtype)),
        torch.outer(v.h[:, 0, 0], v.h[0, :, 0]),
    )
)
case("searchsorted, bucketize")(
    lambda v: (
        torch.bucketize(v.h, torch.linspace(-1, 1, 5, dtype=v.h.dtype)),
        torch.searchsorted(v.y.sort(-1)[0], v.h),
    )
)
for _dim in (0, 1, 2):
    case(f"normalize(dim={_dim})")(lambda v, d=_dim: F.normalize(v.h, dim=d))
    case(f"renorm, glu(dim={_dim})")(lambda v, d=_dim: (torch.renorm(v.h, 2, d, 0.5), F.glu(v.h, d)))

# ------------------------------------------------------------------ norms
case("batch_norm training", lambda: nn.BatchNorm1d(WIDTH))(
    lambda v: (v.module(v.h.transpose(1, 2)).square(), v.module.running_mean.clone(), v.module.running_var.clone())
)
case("batch_norm eval", lambda: nn.BatchNorm1d(WIDTH).eval())(lambda v: v.module(v.h.transpose(1, 2)).square())
case("batch_norm of rows", lambda: nn.BatchNorm1d(WIDTH, affine=False))(lambda v: v.module(v.h.flatten(0, 1)).sin())
case("batch_norm without statistics")(lambda v: F.batch_norm(v.h, None, None, training=True).sin())
case("group_norm", lambda: nn.GroupNorm(2, WIDTH))(lambda v: v.module(v.h.transpose(1, 2)).square())
case("instance_norm", lambda: nn.InstanceNorm1d(WIDTH, affine=True))(lambda v: v.module(v.h.transpose(1, 2)).square())
case("layer_norm", lambda: nn.LayerNorm(WIDTH))(lambda v: v.module(v.h).square())
case("layer_norm of two dimensions", lambda: nn.LayerNorm((SEQ, WIDTH)))(lambda v: v.module(v.h).square())
case("layer_norm of logits", lambda: nn.LayerNorm(CLASSES))(lambda v: v.module(v.logits).square())
case("rms_norm", lambda: nn.RMSNorm(WIDTH))(lambda v: v.module(v.h).square())
case("rms_norm of two dimensions", lambda: nn.RMSNorm((SEQ, WIDTH)))(lambda v: v.module(v.h).square())
case("local_response_norm")(lambda v: F.local_response_norm(v.h, 3))
