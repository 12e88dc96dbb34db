"""Run scenarios with eager PyTorch and with backends, compare, and write the table.

    python -m tests.scenarios [NAMES] [--backend passes mindspeed read_once inductor] [--write docs/scenarios.md]

NAMES are names, or parts of them where no scenario is called so. Inductor runs where one of ours raises or differs, or
where it is named. The exit status is 1 where something that Inductor does rightly is not right here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.scenarios import report, runner, table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", nargs="+", default=["passes"], choices=sorted(table.BACKENDS))
    parser.add_argument("--again", action="store_true", help="run what has been run anew, but eager")
    parser.add_argument("--alone", action="store_true", help="do not ask Inductor where ours is not equal")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one scenario with one backend")
    parser.add_argument("--out", type=Path, default=Path("build", "scenarios_runs"))
    parser.add_argument("--write", type=Path, help="write the table of all that is kept, and of what it has already")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    runner.add_packages()
    scenarios = table.load()
    if args.list:
        print(*scenarios, sep="\n")
        return 0
    named = {part: [part] if part in scenarios else [n for n in scenarios if part in n] for part in args.names}
    if unknown := [part for part, names in named.items() if not names]:
        parser.error(f"no scenario has {', '.join(unknown)} in its name")
    wanted = set(sum(named.values(), []))
    chosen = [s for s in scenarios.values() if not args.names or s.name in wanted]
    runs = runner.Runner(args.out, args.limit)
    rows = []
    for one in chosen:
        for backend in args.backend if args.again else ():
            runs.forget(one.name, backend)
        rows.append(report.judge(runs, one, args.backend, not args.alone))
        print(rows[-1], flush=True)
    runs.close()
    print(report.summary(rows))
    if args.write:
        before = report.read_page(args.write)
        merged = [report.merge(report.read(runs, s), before.get(s.name)) for s in scenarios.values()]
        args.write.write_text(report.page(merged))
    return int(any(row.defect for row in rows))


if __name__ == "__main__":
    sys.exit(main())
