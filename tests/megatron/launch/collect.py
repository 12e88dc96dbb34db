"""Launch scripts that no table has: their arguments read by bash itself, and each that is new run small and compared.

    python -m tests.megatron.launch.collect SCRIPT.sh ... --into collection.json
    python -m tests.megatron.launch.collect --run collection.json --rows rows.jsonl [--most-ranks 4]

A script runs with a PATH of a few harmless commands, and torchrun and python are programs that write down their
arguments; what else it calls does nothing. Scripts that are the same once they are small, and those of the committed
collections, are left out of a run. Rows go to the file one by one, and a second run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.megatron.launch import shrink, table

HARMLESS = "dirname basename date cat pwd realpath seq wc awk sed grep tr cut head tail hostname expr".split()
RECORDED = ("torchrun", "python", "python3", "msrun")
SILENT = "pkill killall ray rm mkdir cp mv sleep pip npu-smi git tee ulimit".split()
RECORD = """#!{bash}
for word in "$@"; do printf '%s\\0' "$word"; done >> "$RECORD"; printf '\\n--end--\\0' >> "$RECORD"
"""


def resolve(script: Path, entries: tuple[str, ...] = ("pretrain",)) -> dict[str, dict[str, object]]:
    """Name -> entry file, processes and arguments of every run that a launch script starts of a file whose name begins
    with one of ``entries``."""
    text = re.sub(r"^\s*(source|set -e|\. ).*$|\|\s*tee.*$", "", script.read_text(), flags=re.M)
    text = re.sub(r"\b(kill|exec)\b", "true", text)
    with tempfile.TemporaryDirectory() as folder:
        commands, record, copy = Path(folder, "bin"), Path(folder, "record"), Path(folder, "script.sh")
        bash = shutil.which("bash") or "/bin/bash"
        _fill(commands, bash)
        copy.write_text(text)
        record.touch()
        environ = {"PATH": str(commands), "RECORD": str(record), "HOME": folder}
        subprocess.run([bash, str(copy)], env=environ, cwd=folder, capture_output=True, timeout=60)
        calls = [call.split("\0")[:-1] for call in record.read_text().split("\n--end--\0") if call]
    runs = [run for words in calls if (run := _run_of(words, entries))]
    stem = f"{script.parent.name}__{script.stem}"
    return {f"{stem}#{n}" if len(runs) > 1 else stem: run for n, run in enumerate(runs)}


def _fill(folder: Path, bash: str) -> None:
    folder.mkdir()
    for name in HARMLESS:
        if (path := shutil.which(name)) is not None:
            (folder / name).symlink_to(path)
    for name in (*RECORDED, *SILENT):
        (folder / name).write_text(RECORD.format(bash=bash) if name in RECORDED else f"#!{bash}\n")
        (folder / name).chmod(0o755)


def _run_of(words: list[str], entries: tuple[str, ...]) -> dict[str, object] | None:
    """Of one call of torchrun or python; None where it starts no training."""
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if place is None or not os.path.basename(words[place]).startswith(entries):
        return None
    given = dict(zip(words[:place], words[1:place]))
    size = lambda *names: next((int(given[n]) for n in names if given.get(n, "").isdigit()), 1)  # noqa: E731
    world = size("--nproc_per_node", "--nproc-per-node") * size("--nnodes")
    return {"entry": os.path.basename(words[place]), "world": world, "args": words[place + 1 :]}


def new_scripts(collection: Path) -> list[shrink.Script]:
    """Scripts of a collection that the committed ones have not, each small form once, few ranks first."""
    small = lambda s: tuple(sorted(shrink.shrink(s, "fp32")[0]))  # noqa: E731
    seen = {small(s) for name in shrink.COLLECTIONS for s in shrink.scripts(name)}
    results = []
    for script in shrink.scripts(collection.stem, collection.parent):
        if (key := small(script)) not in seen:
            seen.add(key)
            results.append(script)
    return sorted(results, key=lambda s: (shrink.shrink(s)[1], s.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", type=Path)
    parser.add_argument("--into", type=Path, help="write the arguments of the scripts to this file")
    parser.add_argument("--run", type=Path, help="a collection to run")
    parser.add_argument("--rows", type=Path, default=Path("rows.jsonl"), help="where the rows of a run go")
    parser.add_argument("--most-ranks", type=int, default=8)
    given = parser.parse_args()
    if given.into:
        given.into.write_text(json.dumps({k: v for s in given.scripts for k, v in resolve(s).items()}, indent=1))
    if given.run:
        done = {json.loads(line)["name"] for line in given.rows.read_text().splitlines()} if given.rows.exists() else ()
        for script in new_scripts(given.run):
            if script.name in done or shrink.shrink(script)[1] > given.most_ranks:
                continue
            row = table.measure(script)
            print(row.world, row.name, row.result, row.difference, row.error or row.refused, flush=True)
            with given.rows.open("a") as rows:
                rows.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
