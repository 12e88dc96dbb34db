"""Memory of a training step, seen: bytes over the schedule as an inline SVG or a PNG, the table of activations, and
time against peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Mapping, Sequence

from mindspeed_fx.report import svg

_COLORS = ("#6e7781", "#0969da", "#1a7f37", "#bf8700", "#8250df")
_WIDTH, _HEIGHT, _LEFT, _TOP = 960, 300, 70, 34
MIB = 2**20


@dataclass(frozen=True)
class Activation:
    """One block of memory that the forward makes and the backward may need."""

    name: str
    operator: str
    bytes: int
    module: str
    source: str
    decision: str
    """"save", "recompute", or "drop" where neither is needed."""
    why: str


@dataclass(frozen=True)
class Curve:
    """Bytes alive during every call of a step."""

    bytes: list[int]
    labels: list[tuple[str, str]]
    """(module, operator) of every call."""
    forward: int
    """How many calls are the forward's."""
    input_bytes: int = 0
    """Bytes of parameters and inputs, part of every entry of ``bytes``."""

    @property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    @property
    def where(self) -> str:
        """The call at which the peak is reached."""
        if not self.bytes:
            return "nothing"
        module, operator = self.labels[self.bytes.index(self.peak)]
        return f"{operator} of {module or 'the model'}"


def markdown(rows: Sequence[Activation]) -> str:
    """The table of activations."""
    cell = lambda text: text.replace("|", "\\|").replace("\n", " ")  # noqa: E731
    lines = ["| bytes | decision | why | module | operator | source |", "|---:|---|---|---|---|---|"]
    lines += [
        f"| {r.bytes} | {r.decision} | {cell(r.why)} | {cell(r.module)} | {r.name} ({cell(r.operator)}) | "
        f"{cell(r.source)} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def picture(curves: Mapping[str, Curve]) -> str:
    """An SVG of memory over the calls of forward and backward; the peak of each curve is marked, hovering names layer
    and operator.
    """
    top = max((c.peak for c in curves.values()), default=0) or 1
    parts = []
    for n, (title, c) in enumerate(curves.items()):
        color = _COLORS[n % len(_COLORS)]
        x, y = _scales(len(c.bytes), top)
        points = " ".join(f"{x(t):.1f},{y(b):.1f}" for t, b in _corners(c.bytes))
        parts.append(svg.element("polyline", points=points, fill="none", stroke=color, stroke_width=1.5))
        words = f"{title}: peak {c.peak / MIB:.2f} MiB at {c.where}"
        if c.bytes:
            at = svg.element("title", escape(words))
            parts.append(svg.element("circle", at, cx=x(c.bytes.index(c.peak)), cy=y(c.peak), r=4, fill=color))
            begins = svg.element("title", escape(f"{title}: the backward begins"))
            parts.append(
                svg.element(
                    "line",
                    begins,
                    x1=x(c.forward),
                    x2=x(c.forward),
                    y1=_TOP,
                    y2=_TOP + _HEIGHT,
                    stroke=color,
                    stroke_dasharray="3 3",
                )
            )
        parts.append(svg.text(_LEFT + 8, 14 + 14 * n, words, color))
    parts += _layers(list(curves.values())[-1])
    parts += [svg.text(4, _TOP + 10, f"{top / MIB:.1f} MiB"), svg.text(4, _TOP + _HEIGHT, "0")]
    return svg.picture(_WIDTH, _TOP + _HEIGHT + 30, parts, "Memory over the calls of the step")


def pareto(points: Sequence[tuple[float, int]]) -> str:
    """Time against peak as text: one line per plan with a bar.

    Args:
        points: (modelled seconds of the step, peak bytes), fastest first.
    """
    most = max((b for _, b in points), default=0) or 1
    lines = [f"{'peak MiB':>10} {'step ms':>10}"]
    lines += [f"{b / MIB:>10.2f} {s * 1e3:>10.3f}  {'#' * round(40 * b / most)}" for s, b in points]
    return "\n".join(lines) + "\n"


def png(curves: Mapping[str, Curve], path: str) -> None:
    """The picture as a PNG file; needs matplotlib.

    Raises:
        ImportError: matplotlib is not installed (extra "report").
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 4), layout="constrained")
    for n, (title, c) in enumerate(curves.items()):
        color = _COLORS[n % len(_COLORS)]
        axis.plot(
            [b / MIB for b in c.bytes],
            color=color,
            label=f"{title}: peak {c.peak / MIB:.2f} MiB at {c.where}",
            drawstyle="steps-post",
        )
        axis.axvline(c.forward, color=color, linestyle=":")
        if c.bytes:
            axis.plot(c.bytes.index(c.peak), c.peak / MIB, "o", color=color)
    axis.set(xlabel="call (the backward begins at the dotted line)", ylabel="MiB", ylim=(0, None))
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _scales(length: int, top: int):
    wide = (_WIDTH - _LEFT - 10) / max(1, length - 1)
    return (lambda t: _LEFT + t * wide), (lambda b: _TOP + _HEIGHT * (1 - b / top))


def _corners(values: Sequence[int]) -> list[tuple[int, int]]:
    """The points of a curve where it turns; of tens of thousands of calls at most as many as can be seen."""
    step = max(1, len(values) // 2000)
    kept = []
    for t in range(0, len(values), step):
        part = values[t : t + step]
        high = max(range(len(part)), key=part.__getitem__)
        if len(kept) < 2 or not kept[-1][1] == kept[-2][1] == part[high]:
            kept.append((t + high, part[high]))
        else:
            kept[-1] = (t + high, part[high])
    return kept


def _layers(curve: Curve) -> list[str]:
    """Marks below the axis where a numbered layer begins."""
    x, _ = _scales(len(curve.bytes), 1)
    parts, before = [], None
    for t, (module, _) in enumerate(curve.labels):
        match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
        if match and match[1] != before:
            before = match[1]
            parts.append(svg.text(x(t), _TOP + _HEIGHT + 14, before, font_size=9))
    return parts
