"""The plan of a parallelized model as a picture: its modules as a tree, colored by what the plan does with their
parameters, and what is sent at their edges. One of several layers that are alike is drawn. An SVG, for the HTML report.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Any, Mapping, Sequence

from mindspeed_fx.sharding.expected import Send

ROW, INDENT, WIDTH, WORDS = 24, 18, 1040, 330
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
    height = ROW * (len(rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for k, (word, color) in enumerate(COLORS.items()):
        parts.append(
            f'<rect x="{10 + 170 * k}" y="4" width="14" height="14" fill="{color}"/><text x="{30 + 170 * k}" y="15" '
            f'fill="currentColor">{escape(word)}</text>'
        )
    for i, (depth, label, kind, placed, sent) in enumerate(rows, 1):
        x, y = 10 + INDENT * depth, ROW * i + 4
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WORDS - INDENT * depth}" height="{ROW - 6}" rx="3" '
            f'fill="{COLORS.get(kind, "none")}" stroke="#999"/><text x="{x + 6}" y="{y + 13}" '
            f'fill="{"#222" if kind else "currentColor"}">{escape(label)}</text>'
        )
        parts.append(f'<text x="{WORDS + 20}" y="{y + 13}" fill="currentColor">{escape(placed)}</text>')
        if sent:
            parts.append(
                f'<path d="M{WORDS + 190} {y + 9} h16 m-5 -4 l5 4 l-5 4" stroke="#b2182b" fill="none"/><text '
                f'x="{WORDS + 212}" y="{y + 13}" fill="#b2182b">{escape(sent)}</text>'
            )
    return "".join([*parts, "</svg>"])


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
