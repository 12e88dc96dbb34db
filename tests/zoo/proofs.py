"""How many of the sites that passes rewrite in model architectures are proved: the page docs/proofs.md.

    python -m tests.zoo.proofs [--write docs/proofs.md [--update]] [--from litgpt=DIR] [--from torchtitan=DIR]
    [architecture ...]

Every architecture's training step is captured and rewritten with ``check="prove"``; nothing is compiled after it.
``--update`` keeps the rows of the file that are not run again.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import re
import time

import torch

from tests.models import captured_records
from tests.zoo import table

OPTIONS = {"codegen": "eager", "check": "prove"}
SECONDS = 300
STATES = ("proved", "checked", "unknown")


def row(name: str, sources: dict[str, str]) -> str:
    """One row of the page: counts by state, "pass proved/sites" and the reasons of what is not proved."""
    from tests.zoo import architectures

    failure = "not built"
    try:
        with table.time_limit(SECONDS):
            model, inputs = architectures.made(name, sources)
            model(**inputs)
            failure, start = "failed", time.perf_counter()
            graphs = captured_records(model, inputs, OPTIONS)
            seconds = time.perf_counter() - start
    except Exception as error:  # noqa: BLE001  goes into the page
        return f"| {name} | | | | | | {failure}: {table.one_line(error).replace('|', '/')} |"
    states: collections.Counter[str] = collections.Counter()
    passes: dict[str, collections.Counter[str]] = {}
    reasons: collections.Counter[str] = collections.Counter()
    for run in (run for g in graphs for run in g.runs):
        for proof in run.proofs:
            states[proof.status] += 1
            passes.setdefault(run.report.name, collections.Counter())[proof.status] += 1
            if proof.reason:
                reasons[f"{run.report.name}: {proof.reason[:160]}"] += 1
    cells = ", ".join(f"{n} {c['proved']}/{c.total()}" for n, c in sorted(passes.items()))
    why = "; ".join(f"{r} ({n} times)" if n > 1 else r for r, n in sorted(reasons.items()))
    counts = " | ".join(str(states[s]) for s in STATES)
    return f"| {name} | {counts} | {seconds:.0f} | {cells} | {why.replace('|', '/')} |"


def markdown(rows: dict[str, str]) -> str:
    """The page, from its rows by name."""
    import transformers

    by_pass: dict[str, list[int]] = {}
    totals = [0, 0, 0]
    for text in rows.values():
        cells = [c.strip() for c in text.strip("|").split(" |")]
        if cells[1]:
            totals = [a + int(b) for a, b in zip(totals, cells[1:4])]
        for name, proved, sites in re.findall(r"([\w.]+) (\d+)/(\d+)", cells[5]):
            counts = by_pass.setdefault(name, [0, 0])
            counts[0], counts[1] = counts[0] + int(proved), counts[1] + int(sites)
    sites = sum(totals)
    lines = [
        "# Proofs",
        "",
        f"Written by `python -m tests.zoo.proofs --write docs/proofs.md` on {datetime.date.today()}: torch "
        f"{torch.__version__}, transformers {transformers.__version__}.",
        "",
        f'Of {sites} sites that the passes on captured graphs rewrite in these architectures, `check="prove"` proves '
        f"{totals[0]} ({100 * totals[0] / max(sites, 1):.1f} %); {totals[1]} more agree on values, of {totals[2]} "
        "nothing is known. What a proof says and how it is found: [passes.md](passes.md#proofs).",
        "A row is from the last run that tried its architecture (`--update`). Seconds are those of capture, rewriting "
        "and proof together, on a loaded machine.",
        "",
        "| pass | proved | sites | share |",
        "|---|---|---|---|",
        *(f"| {n} | {a} | {b} | {100 * a / b:.0f} % |" for n, (a, b) in sorted(by_pass.items())),
        "",
        "| architecture | proved | checked | unknown | seconds | proved/sites by pass | not proved because |",
        "|---|---|---|---|---|---|---|",
        *(rows[name] for name in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, str]:
    """The rows of a page, by name."""
    matches = (re.match(r"\| ([\w./-]+) \|(?: \d* \|| \|){3}", line) for line in text.splitlines())
    return {m[1]: m.string for m in matches if m}


def main() -> None:
    from tests.zoo import architectures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", help="all of every source by default")
    parser.add_argument("--write", help="Markdown file; standard output by default")
    parser.add_argument("--update", action="store_true", help="keep the rows of --write's file that are not run")
    parser.add_argument("--from", dest="sources", action="append", default=[], metavar="NAME=DIR", help="more models")
    args = parser.parse_args()
    sources = table.sources_of(parser, args.sources)
    if args.update and not (args.write and pathlib.Path(args.write).is_file()):
        parser.error("--update needs the file that --write names")
    table.quiet()
    rows = read(pathlib.Path(args.write).read_text()) if args.update else {}
    for name in args.architectures or architectures.every(sources):
        rows[name] = row(name, sources)
        print(rows[name], flush=True)
        if args.write:
            pathlib.Path(args.write).write_text(markdown(rows))
    if not args.write:
        print(markdown(rows))


if __name__ == "__main__":
    main()
