"""Every loss and reduction of loss_cases.py under every named plan against one device, as a table.

python -m tests.sharding.divided_losses [--write docs/divided_losses.md] [--plan zero2] [--jobs 2] [pattern ...]

With patterns, the other rows of the page stay as they were written.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import fnmatch
import logging
import multiprocessing
import pathlib
import re
import warnings

import torch

from mindspeed_fx.sharding.plan import ShardingError
from tests.sharding.loss_cases import CASES
from tests.sharding.loss_model import PLANS, error

GROUP = 8
"""Cases that are run as one model."""
TOLERANCE = 1e-10
SINGLE = 1e-5
"""Of cases that compute in float32 themselves: two orders of float32's sums. Against float64 the gradient of a softmax
over a divided vocabulary is no further off (7e-8, 1.3e-7) than one device's (1.8e-7).
"""


def cells(names: list[str], plan: str) -> list[str]:
    """A cell for each case; those that are equal together are not tried apart."""
    if len(names) > 1 and (together := cell(names, plan)).startswith("equal"):
        return [together] * len(names)
    return [cell([name], plan) for name in names]


def cell(names: list[str], plan: str) -> str:
    """One word for cases under the plan, and how far off or why not."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    try:
        e = error(names, plan)
    except ShardingError as refusal:
        return f"refused ({refusal})"
    except Exception as failure:
        first = str(failure).splitlines()[0] if str(failure) else ""
        return f"failed ({type(failure).__name__}: {first})"
    return f"{'equal' if e <= (SINGLE if any('float32' in n for n in names) else TOLERANCE) else 'wrong'} ({e:.0e})"


def rows(names: list[str], plans: list[str]) -> list[list[str]]:
    """A row for each case."""
    return [list(row) for row in zip(*(cells(names, plan) for plan in plans))]


def markdown(table: dict[str, list[str]], plans: list[str]) -> str:
    words = [c.split(" ", 1)[0] for cells in table.values() for c in cells]
    reasons = sorted({c for cells in table.values() for c in cells if not c.startswith("equal")})
    lines = [
        "# Losses and reductions under every plan",
        "",
        "Written by `python -m tests.sharding.divided_losses --write docs/divided_losses.md` on "
        f"{datetime.date.today()}: torch {torch.__version__}.",
        "",
        "Results and every gradient of a small model, all ranks in one process, float64, against one device: *equal* "
        "and the largest difference relative to the",
        "largest element, *refused* by name, or *wrong*. "
        + ", ".join(f"{words.count(w)} {w}" for w in ("equal", "refused", "wrong", "failed"))
        + ".",
        "The cases are those of `tests/sharding/loss_cases.py`.",
        "",
        "| case | " + " | ".join(f"{p} {'x'.join(str(n) for n in PLANS[p].values())}" for p in plans) + " |",
        "|---|" + "---|" * len(plans),
    ]
    lines += [
        f"| {name} | "
        + " | ".join(
            c if c.startswith(("equal", "wrong")) else f"{c.split(' ', 1)[0]} [{reasons.index(c) + 1}]" for c in cells
        )
        + " |"
        for name, cells in table.items()
    ]
    if reasons:
        lines += ["", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


def read_table(page: str) -> dict[str, list[str]]:
    """The table that :func:`markdown` wrote."""
    lines = page.splitlines()
    reasons = dict(line.split(". ", 1) for line in lines if re.match(r"[0-9]+\. ", line))
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    cited = re.compile(r"\w+ \[([0-9]+)\]")
    return {
        name: [reasons[number[1]] if (number := cited.fullmatch(c)) else c for c in cells] for name, *cells in rows[1:]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--write")
    parser.add_argument("--plan", action="append")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    plans = given.plan or list(PLANS)
    names = [n for n in CASES if any(fnmatch.fnmatch(n, p) for p in given.patterns)]
    table = {}
    with concurrent.futures.ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        groups = [names[i : i + GROUP] for i in range(0, len(names), GROUP)]
        for group, found in zip(groups, pool.map(rows, groups, [plans] * len(groups))):
            for name, row in zip(group, found):
                table[name] = row
                bad = [f"    {p}: {c}\n" for p, c in zip(plans, row) if not c.startswith("equal")]
                print(f"{name}: {len(row) - len(bad)} equal\n", *bad, sep="", end="", flush=True)
    if given.write:
        page = pathlib.Path(given.write)
        if given.patterns != ["*"] and page.exists():
            written = read_table(page.read_text()) | table
            table = {name: written[name] for name in CASES if name in written}
        page.write_text(markdown(table, plans))


if __name__ == "__main__":
    main()
