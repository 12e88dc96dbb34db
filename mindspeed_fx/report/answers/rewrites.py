"""Which layers were left and why, which pass changed a node, what is approximated."""

from __future__ import annotations

import re
from typing import Any, Iterable, Mapping

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.report.answers.base import Answer, Change, Facts, plural
from mindspeed_fx.report.families import KINDS

SEEDED = ("attention_seeded", "dropout_add_seeded")
"""Parts of the names of operators that draw other random numbers than the model."""


def unfused(facts: Facts, kind: str) -> Answer:
    """Layers of one kind that were not fused, with the reason."""
    if kind not in KINDS:
        raise OptionError(f"unfused: no kind of layer {kind!r}{nearest(kind, KINDS)}; valid: {', '.join(KINDS)}")
    names, in_force = KINDS[kind], facts.values["effective"].get("passes", ())
    runs = [run["report"] for run in facts.values["runs"] if run["report"]["name"] in names]
    done = sum(len(r["rewrites"]) for r in runs)
    rows = [
        (_module(s["module"]), r["name"].removeprefix("fusion."), s["source"], s["reason"])
        for r in runs
        for s in r["skipped"]
    ]
    off = [n for n in names if n not in in_force]
    lines = [f"{done} of {done + len(rows)} {kind} are fused"]
    if not rows and not done:
        notes = dict.fromkeys(f"{r['name']}: {note}" for r in runs for note in r["notes"])
        lines = [f"no {kind} were found in this graph" if not off else f"{', '.join(off)} is off", *notes]
        if off:
            lines.append(f'level {facts.values["effective"].get("level")} and "disable" decide which passes run')
    elif not rows:
        lines = [f"none: {done} of {done} {kind} are fused"]
    return Answer(tuple(lines), ("layer", "pass", "line", "why it was left"), rows)


def node(facts: Facts, name: str) -> Answer:
    """Passes that made, changed or removed a node, in order."""
    if not name:
        return Answer(("name a node, as it stands in the graph's code: node NAME",))
    rows = [row for change in facts.changes() for row in _changes_of(change, name)]
    replaced = [
        f"{run['report']['name']} replaced it, with others, by {site['operator']} in {_module(site['module'])}"
        f"{f' ({source})' if (source := site['source']) else ''}"
        for run in facts.values["runs"]
        for site in run["report"]["rewrites"]
        if name in site["nodes"]
    ]
    stages = [
        stage for stage, code in facts.codes().items() if re.search(rf"^ {{4}}(# )?{re.escape(name)}: ", code, re.M)
    ]
    if not rows and not stages and not replaced:
        known = {w for code in facts.codes().values() for w in re.findall(r"^ {4}(?:# )?(\w+): ", code, re.M)}
        known |= {w for change in facts.changes() for w in re.findall(r"^[+-] {4}(\w+): ", change.diff, re.M)}
        raise OptionError(f"node: no graph has a node {name!r}{nearest(name, known)}")
    head = "no pass changed it" if not rows else f"{_passes(rows)} changed it"
    lines = (f"{head}; it is in the graphs {', '.join(stages) or 'of the passes below alone'}", *replaced)
    return Answer(lines, ("pass", "graph", "what", "line"), rows)


def _passes(rows: Iterable[tuple[str, ...]]) -> str:
    count = len({row[0] for row in rows})
    return "1 pass" if count == 1 else f"{count} passes"


def _changes_of(change: Change, name: str) -> Iterable[tuple[str, ...]]:
    """What one difference says of a node: its own line gone, new or both, or read by a line that is."""
    own = re.compile(rf"^([+-]) {{4}}{re.escape(name)}: ")
    word = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w(=])")
    lines = change.diff.splitlines()
    mine = {m[1]: line[1:].strip() for line in lines if (m := own.match(line))}
    label = f"{change.number:02d} {change.name}"
    if mine:
        what = "changed" if len(mine) == 2 else "made" if "+" in mine else "removed"
        yield label, change.stage, what, mine.get("+", mine.get("-", ""))
        return
    reader = next((line[1:].strip() for line in lines if line[:2] == "+ " and word.search(line)), None)
    if reader is not None:
        yield label, change.stage, "read by", reader


def approximated(facts: Facts, _: str) -> Answer:
    """Rewrites that are not bitwise, changes of type, and random numbers of their own."""
    values = facts.values
    ran = [r for r in values["runs"] if r["report"]["rewrites"]]
    close = _counted(r for r in ran if r.get("exact") is False)
    exact = _counted(r for r in ran if r.get("exact"))
    rows = [
        (name, str(n), "close", "equal within the rounding of the operators, not bitwise") for name, n in close.items()
    ]
    rows += [(name, str(n), "exact", "bitwise equal outputs and gradients") for name, n in exact.items()]
    casts = values.get("casts") or []
    for c in (c for c in casts if c["more"] > 0):
        rows.append((c["pass"], str(c["more"]), "type", f"more casts to a shorter floating type ({c['stage']})"))
    seeded = {r["operator"] for r in values["lowered"] if any(s in r["operator"] for s in SEEDED)}
    rows += [(name, "", "random", "draws random numbers of its own, not the model's") for name in sorted(seeded)]
    narrowed = sum(c["more"] for c in casts if c["more"] > 0)
    lines = [
        "no formula is replaced by an approximation: what is rewritten computes the same expression, "
        + (f"{plural(sum(close.values()), 'rewrite')} in another order of roundings" if close else "bit for bit"),
        f"casts to a shorter type that passes added: {narrowed}",
        "random numbers: " + (f"{', '.join(sorted(seeded))} draws its own" if seeded else "the model's own"),
    ]
    if values["effective"].get("codegen") == "inductor":
        lines.append(
            "codegen inductor keeps 16-bit values in float32 inside a generated kernel, where eager rounds after every "
            "operator"
        )
    lines += [f"check of {name} ({stage}): {check}" for name, stage, check in _checks(values)]
    return Answer(tuple(lines), ("pass", "places", "kind", "what it means"), rows)


def _counted(runs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in runs:
        name = run["report"]["name"]
        counts[name] = counts.get(name, 0) + len(run["report"]["rewrites"])
    return counts


def _checks(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [(r["report"]["name"], r["stage"], r["check"]) for r in values["runs"] if r["check"]]


def _module(path: str) -> str:
    return path or "(model)"
