"""Terms as a reader of a report sees them."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.passes.prove.terms import Atom, Poly, law

LONGEST = 400
SIGNS = {"ge": ">= 0", "eq": "== 0", "gt": "> 0", "zero": "== 0"}


@law
def poly_text(p: Poly) -> str:
    parts = []
    for mono, c in list(p.terms.items())[:12]:
        factors = [] if c == 1 and mono else [f"{c:.6g}" if isinstance(c, float) else str(c)]
        factors += [atom_text(a) if e == 1 else f"{atom_text(a)}^{e}" for a, e in mono]
        parts.append("*".join(factors))
    text = " + ".join(parts) + (" + ..." if len(p.terms) > 12 else "")
    return (text or "0")[:LONGEST]


@law
def atom_text(a: Atom) -> str:
    if a.kind == "var":
        return a.data[0]
    if a.kind in ("load", "whole"):
        return f"{a.data[0]}[{_joined(a.data[1 if a.kind == 'load' else 2 :])}]"
    if a.kind == "cond":
        return f"[{a.data[1]}[{_joined(a.data[2:])}]]" if a.data[0] == "load" else f"[{a.data[1]!r} {SIGNS[a.data[0]]}]"
    if a.kind == "wrap":
        return f"({a.data[0]!r})"
    if a.kind == "sum":
        body = "*".join(atom_text(b) if e == 1 else f"{atom_text(b)}^{e}" for b, e in a.data[1])
        return f"sum({', '.join(f'{v.data[0]}<{v.data[1]}' for v in a.data[0])}: {body})"
    if a.kind == "floor":
        return f"floor({a.data[0]!r} / {a.data[1]})"
    return f"{a.kind}({_joined(a.data)})"


def _joined(data: tuple[Any, ...]) -> str:
    return ", ".join(repr(d) if not isinstance(d, str) else d for d in data)
