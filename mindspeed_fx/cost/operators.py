"""What one operator costs: FLOP on the matrix units, FLOP on the vector units, bytes to and from device memory.

    time = launch + max(matrix FLOP / matrix rate, vector FLOP / vector rate, bytes / memory rate) x correction

The correction is one but for products and attention near a shape that was measured: :mod:`measured`.

Sizes are ints or sympy expressions in the symbols of a dynamic graph; so are all results. Conventions:

- ``flops`` is what ``torch.utils.flop_counter`` counts: two for each multiply-add of a product, causal or not.
  ``matrix`` is what a good kernel does of it: causal attention skips the blocks above the diagonal.
- A pointwise result costs one vector FLOP per element, :data:`SPECIAL` where it takes an exponential or a root.
- A kernel reads each input once and writes each output once (:func:`once`), unless the operator's cost says otherwise.
- 16-bit pointwise work is done in float32, as every reference here does.

Costs of ``mindspeed::`` operators stand in their own files (``Operator.costs``); those of ATen in :mod:`aten`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Callable

import sympy

from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.measured import Correction, MeasuredRow, Point, interpolate, point

Size = Any
"""int or sympy.Expr (torch.SymInt where torch's FLOP counter asks)."""

SPECIAL = 16
"""Vector FLOP of one exponential, logarithm, tanh, error function or root. Hopper: 16 special functions against 256
FLOP a cycle and processor (CUDA programming guide, throughput of arithmetic instructions). Assumed to hold elsewhere.
"""

SOFTMAX = SPECIAL + 5
"""Vector FLOP per score of a softmax: scale, maximum, difference, exponential, sum, division."""


@dataclass(frozen=True)
class Spec:
    """A tensor without its values."""

    shape: tuple[Size, ...]
    dtype: str
    itemsize: int
    """Bytes of one element."""
    expanded: tuple[bool, ...] = ()
    """Which dimensions are repetitions of one place in memory; (): none."""
    key: str = ""
    """Equal for specs that share memory, as a view and its base; "" when unknown."""

    @functools.cached_property
    def numel(self) -> Size:
        return math.prod(self.shape)

    @functools.cached_property
    def bytes(self) -> Size:
        """Of the memory it covers: an expanded tensor has less than its shape says."""
        return (
            math.prod(n for n, e in zip(self.shape, self.expanded) if not e) * self.itemsize
            if any(self.expanded)
            else self.numel * self.itemsize
        )


@dataclass(frozen=True)
class Cost:
    """Work of one kernel (or of several, then they are added)."""

    flops: Size = 0
    """As torch's FLOP counter counts."""
    matrix: Size = 0
    """FLOP the matrix units do."""
    vector: Size = 0
    """FLOP the vector units do."""
    read: Size = 0
    """Bytes."""
    write: Size = 0
    dtype: str = "float32"
    """Type of the matrix work."""
    wide: str = "float32"
    """Type of the vector work."""
    launches: int = 1
    cached: Size = 0
    """Bytes of ``read`` that are in the last-level cache: known for a kernel in a graph alone."""
    once: bool = False
    """Made by :func:`once`: bytes are the sizes of inputs and outputs, each once."""
    again: Size = 0
    """What a gradient's kernel computes of ``flops`` that the forward has computed: scores, logits."""
    kind: str = ""
    """Of the matrix work, where its rate is a matter of it: "product", "attention", "attention_backward"."""
    shape: tuple = ()
    """m, n and k of a product; of attention keys, width of a head, heads of all sequences, queries, and the keys that a
    query sees on average: without the last three of several kernels in one."""
    in_turn: bool = False
    """Products and other work take turns: chunks whose products are made before anything reads them."""

    @property
    def bytes(self) -> Size:
        return self.read + self.write

    def terms(self, hw: Hardware) -> dict[str, Any]:
        """Seconds of each term: "matrix", "vector", "memory", "launch"."""
        correction = self.correction(hw)
        factor = 1.0 if correction is None else correction.factor
        return {
            "matrix": factor * self.matrix / hw.matrix_rate(self.dtype, self.kind, self.shape),
            "vector": factor * self.vector / hw.vector_rate(self.wide),
            "memory": factor * ((self.bytes - self.cached) / hw.memory_rate + self.cached / hw.cache_rate),
            "launch": self.launches * float(hw.launch),
        }

    def correction(self, hw: Hardware) -> Correction | None:
        """What kernels that were measured make of this shape; None: nothing, the formula stands alone."""
        if not hw.measured or len(self.shape) < 3 or any(isinstance(n, sympy.Basic) for n in self.shape):
            return None
        return _correction(hw, self.kind, self.dtype, self.shape)

    def seconds(self, hw: Hardware) -> Any:
        """Modelled time on one device; a sympy expression where sizes are symbols."""
        terms = self.terms(hw)
        first = terms["launch"] + (terms["matrix"] if self.in_turn else 0)
        work = [terms[k] for k in ("vector", "memory")] + ([] if self.in_turn else [terms["matrix"]])
        return first + largest(*work)

    def bound(self, hw: Hardware) -> str:
        """The term that takes longest; "" where sizes are symbols or there is nothing to do."""
        terms = self.terms(hw)
        if any(isinstance(t, sympy.Basic) and not t.is_number for t in terms.values()) or not any(terms.values()):
            return ""
        return max(terms, key=lambda k: terms[k])


FREE = Cost(launches=0)
"""Views, and what the compiler computes."""

SIXTEEN = {"bfloat16": "float16", "float16": "bfloat16"}
"""A type, and the one whose rows stand for it where it has none: devices do both at one rate."""


@functools.lru_cache(1 << 16)
def _correction(hw: Hardware, kind: str, dtype: str, shape: tuple) -> Correction | None:
    rows = _measured(hw)
    return interpolate(point(kind, shape), rows.get((kind, dtype)) or rows.get((kind, SIXTEEN.get(dtype, ""))) or ())


@functools.lru_cache(64)
def _measured(hw: Hardware) -> dict[tuple[str, str], list[tuple[Point, float, MeasuredRow, float]]]:
    """Operator and type -> the arguments of :func:`interpolate`."""
    alone = dataclasses.replace(hw, measured=())
    results: dict[tuple[str, str], list[tuple[Point, float, MeasuredRow, float]]] = {}
    for row in hw.measured:
        cost = cost_of(row)
        launch = cost.launches * float(hw.launch)
        work = max(row.seconds - launch, row.seconds / 10)  # a launch may be a little less than the fitted one
        ratio = work / (float(cost.seconds(alone)) - launch)
        at = point(row.operator, cost.shape)
        results.setdefault((row.operator, row.dtype), []).append((at, ratio, row, cost.matrix / row.seconds))
    return results


def cost_of(row: MeasuredRow) -> Cost:
    """The work of a measured kernel."""
    item = {"float32": 4, "float64": 8}.get(row.dtype, 1 if "8" in row.dtype else 2)
    if row.operator == "product":
        m, n, k = row.sizes
        return product(Spec((m, n), row.dtype, item), k, Spec((m, k), row.dtype, item), Spec((k, n), row.dtype, item))
    heads, queries, keys, width = row.sizes
    query, key, value = (Spec((1, heads, n, width), row.dtype, item) for n in (queries, keys, keys))
    if row.operator == "attention":
        return attention(query, query, key, value, row.causal)
    out, gradient = dataclasses.replace(query), dataclasses.replace(query)
    return attention([query, key, value], query, key, value, row.causal, out, gradient, backward=True)


def tensors(*values: Any) -> list[Spec]:
    """The specs among ``values``, each once; lists are looked into."""
    results: dict[int, Spec] = {}
    for v in values:
        if isinstance(v, Spec):
            results[id(v)] = v
        elif isinstance(v, (list, tuple)):
            for spec in tensors(*v):
                results[id(spec)] = spec
    return list(results.values())


def largest(*values: Any) -> Any:
    """The largest of numbers, or of expressions of symbols."""
    return sympy.Max(*values) if any(isinstance(v, sympy.Basic) for v in values) else max(values)


def size(*values: Any) -> Size:
    """Bytes of the specs among ``values``, each once."""
    return sum(t.bytes for t in tensors(*values))


def once(
    out: Any,
    *inputs: Any,
    flops: Size = 0,
    matrix: Size | None = None,
    vector: Size = 0,
    dtype: str = "float32",
    again: Size = 0,
) -> Cost:
    """A kernel that reads each of ``inputs`` once and writes ``out`` once.

    Args:
        out: spec or specs of the results.
        inputs: specs; anything else is ignored, so that all arguments can be handed over.
        flops: as torch's FLOP counter counts.
        matrix: what the matrix units do of it; None: all.
        vector: FLOP of the vector units.
        dtype: of the matrix work.
        again: what the forward has computed of ``flops``.
    """
    wide = "float64" if any(t.dtype == "float64" for t in tensors(out, *inputs)) else "float32"
    matrix = flops if matrix is None else matrix
    return Cost(flops, matrix, vector, size(*inputs), size(out), dtype, wide, once=True, again=again)


def product(out: Any, inner: Size, *inputs: Any, vector: Size = 0) -> Cost:
    """A matrix product: ``out`` elements, each a sum over ``inner``."""
    cost = once(out, *inputs, flops=2 * out.numel * inner, vector=vector, dtype=tensors(*inputs)[0].dtype)
    columns = out.shape[-1] if out.shape else 1
    return as_product(cost, out.numel / columns if columns != 0 else 0, columns, inner)


def as_product(cost: Cost, rows: Size, columns: Size, inner: Size, in_turn: bool = False) -> Cost:
    """The same work at the rate of products [rows, inner] x [inner, columns]."""
    shape = (rows, columns, inner) if all(n != 0 for n in (rows, columns, inner)) else ()
    return dataclasses.replace(cost, kind="product", shape=shape, in_turn=in_turn)


def visible_scores(queries: Size, keys: Size, causal: bool, window: Size = 0) -> Size:
    """Scores of one head that a kernel computes: all, or those a causal mask (aligned at the top left) and a window
    leave.

    Counted to the element; kernels work in blocks and do up to a block's width more per row.
    """
    if not causal:
        return queries * keys
    if window:
        return (
            queries * window - window * (window - 1) // 2
            if _at_least(queries, window)
            else queries * (queries + 1) // 2
        )
    if _at_least(keys, queries):
        return queries * (queries + 1) // 2
    return keys * (keys + 1) // 2 + (queries - keys) * keys


def _at_least(a: Size, b: Size) -> bool:
    return (
        bool(a >= b) if isinstance(a, int) and isinstance(b, int) else True
    )  # a symbol: sequences exceed windows, keys are not fewer than queries


def attention(
    out: Any, q: Spec, k: Spec, v: Spec, causal: bool, *others: Any, window: Size = 0, backward: bool = False
) -> Cost:
    """Flash attention: scores never leave the chip; q, k, v and results move once, since blocks of k and v stay in
    cache.

    Args:
        out: every result.
        q: [batch, heads, q_seq, dim]; k: [batch, kv_heads, kv_seq, dim]; v: [batch, kv_heads, kv_seq, v_dim].
        others: further tensors that are read: mask, statistics, and for the backward output and its gradient.
        window: keys that each query sees, 0 for all.
        backward: five products instead of two (scores again, dV, dP, dQ, dK), as torch counts them.
    """
    (b, h, s, d), (t, e) = q.shape, v.shape[-2:]
    scores, kept = b * h * s * t, b * h * visible_scores(s, t, causal, window)
    each = 2 * (3 * d + 2 * e) if backward else 2 * (d + e)
    cost = once(
        out,
        q,
        k,
        v,
        *others,
        flops=each * scores,
        matrix=each * kept,
        vector=(SOFTMAX + 3 if backward else SOFTMAX) * kept,
        dtype=q.dtype,
        again=2 * d * scores if backward else 0,
    )
    kind = "attention_backward" if backward else "attention"
    seen = visible_scores(s, t, causal, window) / s if not _is_zero(s) else 1
    return dataclasses.replace(cost, kind=kind, shape=(t if not _is_zero(t) else 1, d, b * h, s, seen))


def _is_zero(n: Size) -> bool:
    return isinstance(n, int) and n == 0


def rows_taken(out: Spec, *indices: Any, vector: Size = 0) -> Cost:
    """A gather: of the table only the rows that are asked for are read."""
    return Cost(vector=vector, read=out.bytes + size(*indices), write=out.bytes)


def elements(*values: Any) -> Size:
    """Elements of the largest of the specs among ``values``; by sum of symbols where sizes do not compare."""
    counts = [t.numel for t in tensors(*values)]
    if any(isinstance(c, sympy.Basic) for c in counts):
        return sympy.Max(*counts) if len(set(counts)) > 1 else counts[0]
    return max(counts, default=0)


def spec(tensor: Any, sizes: Callable[[Any], Size] | None = None, key: str = "") -> Spec:
    """The spec of a (fake) tensor.

    Args:
        sizes: what becomes of each dimension; with it strides are looked at too. Without it nothing is asked of the
            tensor that could add a guard.
        key: see :class:`Spec`.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if sizes is None:
        return Spec(tuple(tensor.shape), name, tensor.dtype.itemsize)
    strides = tensor.stride() if str(tensor.layout) == "torch.strided" else ()
    return Spec(
        tuple(sizes(n) for n in tensor.shape),
        name,
        tensor.dtype.itemsize,
        tuple(isinstance(s, int) and s == 0 for s in strides),
        key,
    )
