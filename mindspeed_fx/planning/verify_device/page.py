"""What the file has, as text."""

from __future__ import annotations

from typing import Any

MANY = 40
"""Failures that are printed; the file has all."""


def text(content: dict[str, Any]) -> str:
    """A table of kinds and types, the failures, and the times."""
    device = f"{content['device']} ({content['target']}{', emulated' if content['is_emulated'] else ''})"
    versions = ", ".join(f"{k} {v}" for k, v in content["versions"].items() if v)
    lines = [device, versions, "", *_table(content["results"])]
    failed = [r for r in content["results"] if r["state"] == "failed"]
    if failed:
        lines += ["", "failed"] + [f"  {r['key']}: {r.get('problem', '')}" for r in failed[:MANY]]
        lines += [f"  and {len(failed) - MANY} more in the file"] * (len(failed) > MANY)
    rows = [row for r in content["results"] for row in r.get("rows", ())]
    lines += ["", *_times(rows)] if rows else []
    links = [r for r in content["results"] if r.get("kind") == "collective" and "seconds" in r]
    lines += ["", *_links(links)] if links else []
    if not content["finished"]:
        lines += ["", "there was no time for all: the same command goes on where this one ended"]
    return "\n".join(lines)


def _table(results: list[dict[str, Any]]) -> list[str]:
    """One line for each kind and type: passed, failed, not run, and the error that is nearest to its tolerance."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in results:
        kind, *_, dtype = r["key"].split("/")
        cells.setdefault((kind, r.get("dtype", dtype)), []).append(r)
    lines = [f"{'':<12}{'':<10}{'passed':>8}{'failed':>8}{'not run':>9}  nearest to its tolerance"]
    for (kind, dtype), rows in cells.items():
        counts = [sum(r["state"] == s for r in rows) for s in ("passed", "failed", "not run")]
        near = max(
            (r for r in rows if r["state"] == "passed" and r.get("tolerance")),
            key=lambda r: r["error"] / r["tolerance"],
            default=None,
        )
        told = f"{near['error']:.1e} of {near['tolerance']:.1e}, {near['name']}" if near else ""
        lines.append(f"{kind:<12}{dtype:<10}{counts[0]:>8}{counts[1]:>8}{counts[2]:>9}  {told}")
    return lines


def _times(rows: list[dict[str, Any]]) -> list[str]:
    """Kernels and fusions, in microseconds."""
    lines = [f"{'microseconds':<44}{'here':>10}{'unfused':>10}{'modelled':>10}  kernel"]
    for r in rows:
        model = f"{r['model_seconds'] * 1e6:>10.1f}" if r["model_seconds"] is not None else f"{'-':>10}"
        here, unfused = r["seconds"] * 1e6, r["unfused_seconds"] * 1e6
        lines.append(f"{r['name']:<44}{here:>10.1f}{unfused:>10.1f}{model}  {r['kernel']}")
    return lines


def _links(rows: list[dict[str, Any]]) -> list[str]:
    """Collectives, in microseconds."""
    lines = [f"{'microseconds':<44}{'here':>10}{'modelled':>10}"]
    for r in rows:
        model = f"{r['model_seconds'] * 1e6:>10.1f}" if r.get("model_seconds") is not None else f"{'-':>10}"
        lines.append(f"{r['name'] + ' ' + r['dtype']:<44}{r['seconds'] * 1e6:>10.1f}{model}")
    return lines
