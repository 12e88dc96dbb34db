"""The plan of a parallelized model as a picture: its modules as a tree, colored by what the plan does with their
parameters, and what is sent at their edges. One of several layers that are alike is drawn. An SVG, for the HTML report.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Mapping, Sequence

from mindspeed_fx.report import svg
from mindspeed_fx.sharding.expected import Send

ROW, INDENT, WIDTH, WORDS = 24, 18, 1040, 330
LETTER = 6
"""Width of a letter at 11 pixels, of a sans serif in the mean."""

COLORS = {"whole": "#d9d9d9", "in parts": "#fdb462", "gathered before use": "#8dd3c7", "both": "#bebada"}
NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def picture(parameters: Mapping[str, Mapping[str, str]], gather: Mapping[str, str], messages: Sequence[Send]) -> str:
    """The SVG.

    Args:
        parameters: name -> placements at rest, mesh dimension -> word ("S(0)").
        gather: as in the plan.
        messages: what its edges need.
    """
    rows = _rows(parameters, gather, messages)
    parts = []
    for k, (word, color) in enumerate(COLORS.items()):
        parts += [svg.rect(10 + 170 * k, 4, 14, 14, color), svg.text(30 + 170 * k, 15, word)]
    for i, (depth, label, kind, placed, sent) in enumerate(rows, 1):
        x, y = 10 + INDENT * depth, ROW * i + 4
        width = WORDS - INDENT * depth
        parts += [
            svg.rect(x, y, width, ROW - 6, COLORS.get(kind, "none"), rx=3, stroke="#999"),
            svg.text(x + 6, y + 13, label, "#222" if kind else "currentColor"),
            svg.text(WORDS + 20, y + 13, placed),
        ]
        if sent:
            arrow = f"M{WORDS + 190} {y + 9} h16 m-5 -4 l5 4 l-5 4"
            parts += [
                svg.element("path", d=arrow, stroke="#b2182b", fill="none"),
                svg.text(WORDS + 212, y + 13, sent, "#b2182b"),
            ]
    width = max([WIDTH, *(WORDS + 220 + LETTER * len(sent) for *_, sent in rows)])
    return svg.picture(width, ROW * (len(rows) + 2), parts, "The plan's modules, placements and messages")


def _rows(
    parameters: Mapping[str, Mapping[str, str]], gather: Mapping[str, str], messages: Sequence[Send]
) -> list[tuple[int, str, str, str, str]]:
    """Depth, module, color, placements, what is sent, of every module with parameters or edges and of those around
    them.
    """
    alike = Counter(NUMBER.sub(".*", name) for name in parameters)
    placed: dict[str, dict[str, str]] = {}
    for name, words in parameters.items():
        module, _, own = NUMBER.sub(".*", name).rpartition(".")
        placed.setdefault(module, {})[own] = (
            " ".join(f"{d}: {w}{f' ({gather[d]})' if d in gather else ''}" for d, w in words.items()) or "whole"
        )
    counts: dict[str, Counter] = {}
    owners = set(placed)
    for s in messages:
        module = NUMBER.sub(".*", s.module)
        if module not in owners and module.rpartition(".")[0] in owners:
            module = module.rpartition(".")[0]  # a parameter's own
        copies = max((alike[n] for n in alike if n.startswith(f"{module}.")), default=1) or 1
        counts.setdefault(module, Counter())[
            f"{s.kind} {'back' if s.backward else 'forward'} over {s.dim}, {s.bytes / 2**20:.3g} MiB", copies
        ] += 1
    names = sorted({m for n in (*placed, *counts) for m in _above(n)}, key=_order(placed, counts))
    rows = []
    for name in names:
        own = placed.get(name, {})
        sent = "; ".join(f"{max(1, round(n / copies))} x {word}" for (word, copies), n in counts.get(name, {}).items())
        rows.append(
            (
                name.count(".") if name else 0,
                name.rpartition(".")[2] or "(model)",
                _kind(own, gather),
                "; ".join(dict.fromkeys(own.values())),
                sent,
            )
        )
    return rows


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _order(*known: Mapping[str, Any]) -> Any:
    """Modules in the order of the model: each behind the module that it is part of."""
    first: dict[str, int] = {}
    for name in (n for names in known for n in names):
        for above in _above(name):
            first.setdefault(above, len(first))
    return lambda name: [first[a] for a in _above(name)]


def _kind(own: Mapping[str, str], gather: Mapping[str, str]) -> str:
    if not own:
        return ""
    words = " ".join(own.values())
    dims = set(re.findall(r"(\w+): S", words))
    stored, computed = bool(dims & set(gather)), bool(dims - set(gather))
    return "both" if stored and computed else "gathered before use" if stored else "in parts" if computed else "whole"
