"""How many fusable sites a model has, counted while it runs in eager mode, without a graph and without our matchers.

Every tensor that a torch function returns is labelled with what it is ("a square", "a mean square", "attention
weights"); a site is counted where the labels meet. What the passes find is held against these numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

T = torch.Tensor
ADD, MUL, DIV = (
    (getattr(torch, n), *(getattr(T, f) for f in (n, f"__{n}__", f"__r{n}__", f"{n}_", f"__i{n}__") if hasattr(T, f)))
    for n in ("add", "mul", "div")
)
SUB = (torch.sub, T.sub, T.__sub__)
DIV += (T.__truediv__, T.__rtruediv__, T.true_divide)
PRODUCT = (torch.matmul, torch.bmm, T.matmul, T.bmm, T.__matmul__, torch.einsum)
SOFTMAX = (torch.softmax, T.softmax, F.softmax)
LOG_SOFTMAX = (torch.log_softmax, T.log_softmax, F.log_softmax)
SQUARE = (torch.square, T.square)
POWER = (torch.pow, T.pow, T.__pow__)
SQRT, RSQRT = (torch.sqrt, T.sqrt), (torch.rsqrt, T.rsqrt)
MEAN = (torch.mean, T.mean)
VAR = (torch.var, T.var)
NEG = (torch.neg, T.neg, T.__neg__)
JOIN = (torch.cat, torch.stack, torch.concat)
ACTIVATION = {
    F.silu: "silu",
    torch.sigmoid: "sigmoid",
    F.gelu: "gelu",
    torch._C._nn.gelu: "gelu",
    torch._C._nn.silu_: "silu",
}
SAME = (
    T.to,
    T.type_as,
    T.float,
    T.double,
    T.half,
    T.bfloat16,
    T.type,
    F.dropout,
    torch.dropout,
    T.contiguous,
    T.clone,
    T.view,
    T.reshape,
    torch.reshape,
    T.flatten,
    torch.flatten,
    T.unflatten,
    T.squeeze,
    T.unsqueeze,
    T.expand,
    T.masked_fill,
    torch.masked_fill,
    torch.where,
    T.nan_to_num,
    T.__getitem__,
)


class CountSites(TorchFunctionMode):
    """Context manager; ``counts`` has the number of sites per pass name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._labels: dict[int, tuple[str, Any]] = {}
        self._alive: list[Any] = []  # an id is only good while its tensor lives

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = (
            [*args[:1], *(args[1] if isinstance(args[1], (list, tuple)) else args[1:])]
            if function is torch.einsum
            else args
        )
        label = self._label(function, [a for a in tensors if isinstance(a, (T, int, float))], args, kwargs or {})
        if label is not None and isinstance(result, T):
            self._labels[id(result)] = label
            self._alive.append((result, args))
        return result

    def _of(self, a: Any) -> str | None:
        label = self._labels.get(id(a), (None, None))[0]
        return None if label == "scaled" else label  # says nothing by itself: only an activation looks for it

    def _unscaled(self, a: Any) -> Any:
        label, base = self._labels.get(id(a), (None, None))
        return base if label == "scaled" else a

    def _label(self, f, given, args, kwargs) -> tuple[str, Any] | None:
        labels = [self._of(a) for a in given]
        if (
            f in SQUARE
            or (f in POWER and _exponent(args) == 2)
            or (f in MUL and len(given) == 2 and given[0] is given[1])
        ):
            return "square", given[0]
        if f in MEAN and labels[:1] == ["square"] and _last(args, kwargs):
            return "mean square", self._labels[id(given[0])][1]
        if f in MEAN and labels[:1] == [None] and _last(args, kwargs) and given[0].is_floating_point():
            return "mean", given[0]
        if f in SUB and labels[1:2] == ["mean"] and self._labels[id(given[1])][1] is given[0]:
            return "centered", given[0]
        if (
            f in VAR
            and labels[:1] == [None]
            and _last(args, kwargs)
            and not kwargs.get("unbiased", kwargs.get("correction", True))
        ):
            return "mean square", given[0]
        if f in ADD and "mean square" in labels:
            return self._labels[id(given[labels.index("mean square")])]
        if labels[:1] == ["mean square"] and (f in RSQRT or f in SQRT or (f in POWER and _exponent(args) == -0.5)):
            return "root mean square", self._labels[id(given[0])][1]
        if f in (*MUL, *DIV) and "root mean square" in labels and len(given) == 2:
            other = given[1 - labels.index("root mean square")]
            if not isinstance(other, T):  # 1 / root
                return self._labels[id(given[labels.index("root mean square")])]
            if other.shape != self._labels[id(given[labels.index("root mean square")])][1].shape:
                return None
            return self._site("fusion.layer_norm" if "centered" in labels else "fusion.rms_norm")
        if f in (F.layer_norm, torch.layer_norm) and len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) == 1:
            return self._site("fusion.layer_norm")
        if f in (F.rms_norm, torch.rms_norm) and len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) == 1:
            return self._site("fusion.rms_norm")
        if f in SOFTMAX and given[0].dim() >= 3:
            return "weights", None
        if f in PRODUCT and (labels[:1] == ["weights"] or (f is torch.einsum and "weights" in labels)):
            return self._site("fusion.attention")
        if f is F.scaled_dot_product_attention:
            return self._site("fusion.attention")
        if f in LOG_SOFTMAX:
            return "log weights", None
        if f is F.cross_entropy or (f is F.nll_loss and labels[:1] == ["log weights"]):
            return self._site("fusion.cross_entropy")
        if f in ACTIVATION or (f in (T.sigmoid,)):
            return ACTIVATION.get(f, "sigmoid"), self._unscaled(given[0])  # x * sigmoid(1.702 * x) as well
        if f in SUB and labels == ["product", "product"]:
            return "difference of products", None
        if f in ADD and labels == ["product", "product"]:
            return "sum of products", None
        if f in JOIN and [self._of(a) for a in args[0]] == ["difference of products", "sum of products"]:
            return self._site("fusion.rope")
        if f in MUL and any(isinstance(a, T) and a.is_complex() for a in given):
            return "complex product", None
        if f is torch.view_as_real and labels == ["complex product"]:
            return self._site("fusion.rope")
        if f in MUL:
            if "silu" in labels:
                return self._site("fusion.swiglu") if all(isinstance(a, T) for a in given) else None
            if "sigmoid" in labels and len(given) == 2:
                gate = self._labels[id(given[labels.index("sigmoid")])][1]
                other = given[1 - labels.index("sigmoid")]
                return ("silu", gate) if other is gate else None
            if "gelu" in labels:
                return self._site("fusion.glu") if all(isinstance(a, T) for a in given) else None
            if "turned" in labels:
                return "turned times sin", None
            return (
                ("product", None)
                if all(isinstance(a, T) for a in given)
                else ("scaled", next(a for a in given if isinstance(a, T)))
            )
        if f in NEG:
            return "negative", None
        if f in JOIN and any(self._of(a) == "negative" for a in args[0]):
            return "turned", None
        if f in ADD and "turned times sin" in labels:
            return self._site("fusion.rope")
        if f in SAME and labels[:1] != [None] and labels:
            return self._labels[id(given[0])]
        return None

    def _site(self, name: str) -> None:
        self.counts[name] += 1


def _exponent(args) -> Any:
    return args[1] if len(args) > 1 and isinstance(args[1], (int, float)) else None


def _last(args, kwargs) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim in (-1, args[0].dim() - 1) or (
        isinstance(dim, (list, tuple)) and list(dim) in ([-1], [args[0].dim() - 1])
    )
