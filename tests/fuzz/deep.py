"""Models of many layers that are alike: one block is written, and written again for each further layer."""

from __future__ import annotations

import re
from typing import Sequence

from .blocks import block
from .program import Region, Statement
from .writer import HIDDEN, Writer

NAME = re.compile(r"\bself\.(m\d+)\b|\b[tx]\d+\b")
TABLES = ("{}[:, :1].detach().cos()", "torch.tanh({} @ {})", "{} * 0.5")


def stack(w: Writer, x: str, layers: int) -> str:
    """``x`` after so many layers, each with parameters of its own; now and then each is recomputed, or all read one
    value, which has a gradient or none.
    """
    table = None
    if w.random.random() < 0.6:
        text = w.random.choice(TABLES)
        table = w.emit(text, *[x, w.weight(HIDDEN, HIDDEN)][: text.count("{}")])
    known, start, outside = set(w.program.members), len(w.body), list(w.visible)
    recomputed = w.random.random() < 0.2
    y = w.attempt(_layer, x, table, recomputed)
    if y is None:
        return x
    written, last = list(w.body[start:]), y
    for _ in range(layers - 1):
        names = {x: last}
        if w.attempt(_again, written, names, known) is None:
            break
        last = names[y]
    w.visible = [*outside, last] if recomputed else w.visible
    return last


def _layer(w: Writer, x: str, table: str | None, recomputed: bool) -> str:
    if recomputed:
        with w.region("checkpoint") as region:
            y = _layer(w, x, table, False)
            region.outs = (y,)
        return y
    y = block(w, x)
    return y if table is None else w.emit(w.random.choice(["{} * {}", "{} + {}"]), y, table)


def _again(w: Writer, parts: Sequence[Statement | Region], names: dict[str, str], known: set[str]) -> bool:
    """Writes the parts of the first layer for the next.

    Args:
        names: what values of the first layer are called in this one; these are added.
        known: members that all layers share.
    """

    def renamed(match: re.Match[str]) -> str:
        member = match[1]
        if member and member not in known and match[0] not in names:
            names[match[0]] = w.member(w.program.members[member])
        return names.get(match[0], match[0])

    for part in parts:
        if isinstance(part, Region):
            with w.region(part.kind) as region:
                _again(w, part.body, names, known)
                region.outs = tuple(names.get(n, n) for n in part.outs)
            continue
        if part.name:
            names[part.name] = w.name()
        w.run(NAME.sub(renamed, part.text), names.get(part.name or ""))
    return True
