"""What operators make of parts: each is described by what it computes, not by how it was divided.

``"...H,H -> ...H,...1"`` names the dimensions of every tensor that an operator reads and writes. Along a capital letter
it reads all elements, so that no rank may hold a part of that dimension; a small letter and the dots are indices of
which every value is computed apart. What a result lacks and an argument has is summed, and a sum of which ranks hold
parts is partial. An argument named by ``linear`` may be a partial sum, if the others are whole over that mesh
dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Hashable, Sequence

from mindspeed_fx.sharding.audit.relations.parts import Dim, Part, Profile, Terms, Unknown, Unproved, merged, profile

SPREAD = "0"
"""Result without elements."""


@dataclass(frozen=True)
class Rule:
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    linear: tuple[int, ...] = ()
    """Arguments (numbers of tensors) in which the operator is linear, alone."""
    alike: tuple[str, ...] = ()
    """Letters of dimensions that are divided alike though their sizes differ ("hk")."""


def rule(text: str, linear: Sequence[int] = (), alike: Sequence[str] = ()) -> Rule:
    reads, _, writes = text.replace(" ", "").partition("->")
    return Rule(tuple(reads.split(",")), tuple(writes.split(",")), tuple(linear), tuple(alike))


RULES = {
    "mindspeed.rms_norm": rule("...H,H -> ...H,...1"),
    "mindspeed.rms_norm_backward": rule("...H,...H,H,...1 -> ...H,H", linear=[0]),
    "mindspeed.layer_norm": rule("...H,H,H -> ...H,...1,...1"),
    "mindspeed.layer_norm_backward": rule("...H,...H,...1,...1,H -> ...H,H,H", linear=[0]),
    "mindspeed.rope": rule("...D,...D,...D -> ...D", linear=[0]),
    "mindspeed.rope_backward": rule("...D,...D,...D,...D -> ...D,0,0"),
    "mindspeed.swiglu": rule("...,... -> ..."),
    "mindspeed.swiglu_backward": rule("...,...,... -> ...,...", linear=[0]),
    "mindspeed.attention": rule("bhID,bkJD,bkJE -> bhIE,bhI", alike=["hk"]),
    "mindspeed.attention_backward": rule(
        "bhIE,bhID,bkJD,bkJE,bhIE,bhI -> bhID,bkJD,bkJE", linear=[0], alike=["hk"]
    ),
    "mindspeed.cross_entropy": rule("tV,t -> t,t"),
    "mindspeed.cross_entropy_backward": rule("t,tV,t,t -> tV", linear=[0]),
    "aten.cat": rule("...C,...C -> ...C"),
    "aten._softmax": rule("...C -> ...C"),
    "aten._softmax_backward_data": rule("...C,...C -> ...C", linear=[0]),
}  # fmt: skip

POINTWISE = frozenset(
    "mul div add sub neg pow reciprocal cos sin exp sigmoid silu gelu relu tanh rsqrt sqrt _to_copy where eq ne lt le "
    "gt ge log masked_fill bitwise_not bitwise_and logical_not "
    "sigmoid_backward silu_backward gelu_backward threshold_backward tanh_backward clamp".split()
)
ADDITIVE = frozenset(["add", "sub"])
EACH = frozenset(["mul"])
"""Linear in each argument alone."""
FIRST = frozenset(["div", "neg", "_to_copy", "mul"])
"""Linear in the first argument, where the others are numbers."""


def dot(terms: Terms, a: Part, over_a: Sequence[int], b: Part, over_b: Sequence[int]) -> Part:
    """The sum over ``over_a`` of ``a`` and ``over_b`` of ``b``; the result has the other dimensions, those of ``a``
    first. It is one term whichever comes first, and however its dimensions are arranged."""
    summed = [merged(d for i in over for d in x.dims[i]) for x, over in ((a, over_a), (b, over_b))]
    _alike(profile(summed[0]), profile(summed[1]), "what is summed")
    partial = _sums([a, b], {d.mesh for d in summed[0] if d.mesh}, linear=(0, 1))
    keys = [(x.term, *merged(d._replace(mesh="") for d in dim)) for x, dim in ((a, summed[0]), (b, summed[1]))]
    term = terms.number("dot", *sorted(keys))
    dims = []
    for x, over, key in ((a, over_a, keys[0]), (b, over_b, keys[1])):
        rest = [dim for i, dim in enumerate(x.dims) if i not in over]
        dims += [tuple(d._replace(root=terms.number("of", term, key, d.root)) for d in dim) for dim in rest]
    _once(dims)
    return Part(term, tuple(dims), partial)


def summed(terms: Terms, x: Part, over: Sequence[int], keep: bool) -> Part:
    """``x`` summed over dimensions."""
    gone = merged(d for i in over for d in x.dims[i])
    partial = _sums([x], {d.mesh for d in gone if d.mesh}, linear=(0,))
    term = terms.number("sum", x.term, merged(d._replace(mesh="") for d in gone))
    terms.defined[term] = ("sum", tuple(over), (x,))
    rest = [() if i in over else dim for i, dim in enumerate(x.dims) if keep or i not in over]
    dims = [tuple(d._replace(root=terms.number("of", term, d.root)) for d in dim) for dim in rest]
    return Part(term, tuple(dims), partial)


def pointwise(terms: Terms, name: str, key: Hashable, parts: Sequence[Part], commutes: bool = False) -> Part:
    """Element by element, with broadcasting."""
    if name in ADDITIVE:
        parts = _as_sums(terms, parts)
    rank = max(len(p.dims) for p in parts)
    dims = [((),) * (rank - len(p.dims)) + p.dims for p in parts]
    whole = [((1,) * (rank - len(p.dims))) + p.whole for p in parts]
    sizes = [max(w[i] for w in whole) for i in range(rank)]
    profiles = [
        _common([profile(d[i]) for d, w in zip(dims, whole) if w[i] > 1], f"dimension {i}") for i in range(rank)
    ]
    if name in ADDITIVE and len(parts) > 1:
        partial = parts[0].partial
        if any(p.partial != partial for p in parts):
            raise Unproved(f"{name} adds a partial sum over {_different(parts)} to what is none")
    else:
        linear = (
            tuple(range(len(parts)))
            if name in EACH
            else (0,)
            if name == "div" or (name in FIRST and len(parts) == 1)
            else ()
        )
        partial = _sums(parts, set(), linear)
    reads = [p.arranged for p in parts]
    if commutes:
        if name == "add":  # of more than two: in whatever order they are added up
            addends = [terms.addends.get(r, (r,)) if w == tuple(sizes) else (r,) for r, w in zip(reads, whole)]
            reads = [r for each in addends for r in each]
        reads.sort()
    result = terms.fresh((name, key, *reads), sizes, profiles, partial)
    if commutes and name == "add":
        terms.addends[result.arranged] = tuple(reads)
    terms.defined[result.term] = (name, key, tuple(parts))
    return result


def _as_sums(terms: Terms, parts: Sequence[Part]) -> list[Part]:
    """A whole value over the number of ranks is a partial sum of it, where it is added to another."""
    every = frozenset[str]().union(*(p.partial for p in parts))
    result = []
    for p in parts:
        missing = every - p.partial
        whole, number = terms.quotients.get(p.term, (p, 0))
        if missing and number == math.prod(terms.ranks[m] for m in missing) and not missing & set(whole.meshes()):
            p = replace(whole, partial=whole.partial | missing)
        result.append(p)
    return result


def apply(terms: Terms, name: str, key: Hashable, parts: Sequence[Part]) -> list[Part | None]:
    """The results of an operator of :data:`RULES`."""
    spec = RULES[name]
    reads = spec.reads
    if name == "aten.cat":
        reads = reads[:1] * len(parts)
    if len(parts) != len(reads):
        raise Unknown(f"{name} of {len(parts)} tensors")
    sizes: dict[str, int] = {}
    profiles: dict[str, list[Profile]] = {}
    dots = max((len(p.dims) - len(r.replace("...", "")) for p, r in zip(parts, reads) if "..." in r), default=0)
    for part, text in zip(parts, reads):
        letters = _letters(text, len(part.dims), dots)
        for letter, dim, size in zip(letters, part.dims, part.whole, strict=True):
            if letter.isupper() and profile(dim):
                raise Unproved(f"{name} reads all of a dimension of which ranks hold parts ({profile(dim)[0][0]})")
            if size > 1 or letter not in sizes:
                sizes[letter] = max(size, sizes.get(letter, 1))
            if size > 1:
                first = next((a[0] for a in spec.alike if letter in a), letter)
                profiles.setdefault(first, []).append(profile(dim))
    common = {letter: _common(all_of, f"dimension {letter}") for letter, all_of in profiles.items()}
    for group in spec.alike:
        common.update(dict.fromkeys(group, common.get(group[0], ())))
    _unique(list({k: v for k, v in common.items() if not any(k in g[1:] for g in spec.alike)}.values()))
    term_key = (name, key, *(p.arranged for p in parts))
    results: list[Part | None] = []
    for i, text in enumerate(spec.writes):
        if text == SPREAD:
            results.append(None)
            continue
        letters = _letters(text, dots + len(text.replace("...", "")), dots)
        over = {
            m for letter, shared in common.items() if letter not in letters for m, _ in shared if letter in profiles
        }
        over -= {m for letter in letters for m, _ in common.get(letter, ())}
        partial = _sums(parts, over if spec.linear else set(), spec.linear)
        if over and not spec.linear:
            raise Unproved(f"{name} sums over parts")
        shape = [1 if c == "1" else sizes[c] for c in letters]
        shared = [() if c == "1" else common.get(c, ()) for c in letters]
        results.append(terms.fresh((*term_key, i), shape, shared, partial))
    return results


def _letters(text: str, rank: int, dots: int) -> list[str]:
    """One name for each dimension; those of the dots are numbered from the right."""
    before, has, after = text.partition("...")
    if not has:
        return list(text)
    here = rank - len(before) - len(after)
    return [*before, *(f"x{dots - here + i}" for i in range(here)), *after]


def _common(profiles: Sequence[Profile], where: str) -> Profile:
    for p in profiles[1:]:
        _alike(profiles[0], p, where)
    return profiles[0] if profiles else ()


def _alike(a: Profile, b: Profile, where: str) -> None:
    if a != b:
        raise Unproved(f"{where}: one tensor is divided over {_names(a)}, another over {_names(b)}")


def _names(p: Profile) -> str:
    return ", ".join(m for m, _ in p) or "nothing"


def _unique(profiles: Sequence[Profile]) -> None:
    names = [m for p in profiles for m, _ in p]
    if len(names) > len(set(names)):
        raise Unproved(f"two dimensions are divided over {next(m for m in names if names.count(m) > 1)}")


def _once(dims: Sequence[Dim]) -> None:
    _unique([profile(d) for d in dims])


def _different(parts: Sequence[Part]) -> str:
    every = frozenset.union(*(p.partial for p in parts))
    return ", ".join(sorted(every - frozenset.intersection(*(p.partial for p in parts))))


def _sums(parts: Sequence[Part], over: set[str], linear: Sequence[int]) -> frozenset[str]:
    """Mesh dimensions over which the result is a partial sum: those over which it sums parts, and those of an argument
    in which it is linear while nothing else knows of them."""
    result = set(over)
    for i, p in enumerate(parts):
        for m in p.partial:
            if i not in linear:
                raise Unproved(f"a partial sum over {m} is read by what is not linear in it")
            if m in over or any(m in q.partial or m in q.meshes() for j, q in enumerate(parts) if j != i):
                raise Unproved(f"a partial sum over {m} meets parts over {m}")
            result.add(m)
    return frozenset(result)
