"""The launch scripts of MindSpeed's system tests (July 2026) and MindSpeed-LLM's examples (August 2026), with every
shell variable resolved and paths left out, and docs/mindspeed_scripts.md, written from them:

    python -m tests.megatron.flags.scripts > docs/mindspeed_scripts.md
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mindspeed_fx.megatron import flags
from mindspeed_fx.megatron.flags.account import account
from tests.megatron.flags.words import parse
from tests.megatron.launch import shrink

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS: dict[str, dict] = {
    name: script
    for file in ("mindspeed.json", "mindspeed_llm.json")
    for name, script in json.loads((LAUNCH / file).read_text()).items()
}
"""Name -> entry script, processes ("world"), arguments ("args")."""

HEAD = """# MindSpeed's scripts

What becomes of the flags of 61 scripts: 31 of MindSpeed's system tests, 30 of MindSpeed-LLM's examples
(`tests/megatron/launch/*.json`). *skip*: flags of memory or speed alone, with which the run ends unless
`--mindspeed-skip-flags` names them; *refused*: what has to be changed in the script, or is not done yet.
[mindspeed_flags.md](mindspeed_flags.md) says of each flag what to do instead. This is about flags alone: nothing
was run.

"""


def words(name: str) -> list[str]:
    """The arguments of a script, with a file where paths were left out."""
    args = [*SCRIPTS[name]["args"]]
    if shrink.FSDP2 in args:
        args[args.index(shrink.FSDP2) + 1] = str(shrink.SETTINGS[""])
    return args


def refused(name: str) -> dict[str, bool]:
    """The flags of a script that are not done -> whether it can be skipped."""
    accounts = account(parse(words(name)), words(name))
    return {a.flag: a.flag in flags.BY_KEY and flags.BY_KEY[a.flag].skip for a in accounts if a.is_refused}


def page() -> str:
    rows = {name: refused(name) for name in SCRIPTS}
    free, skips = [n for n, r in rows.items() if not r], [n for n, r in rows.items() if r and all(r.values())]
    counts = Counter(flag for r in rows.values() for flag in r)
    numbers = (
        f"{len(free)} scripts run with every flag done, {len(skips)} more when flags of memory and speed are skipped, "
        f"{len(rows) - len(free) - len(skips)} have to be changed.\n\n"
    )
    most = ", ".join(f"`{flag}` {count}" for flag, count in counts.most_common(8))
    table = "".join(
        f"| {name} | {_list(r, True)} | {_list(r, False)} |\n"
        for name, r in sorted(rows.items(), key=lambda row: row[0])
    )
    return f"{HEAD}{numbers}Most often: {most}.\n\n| script | skip | refused |\n|---|---|---|\n{table}"


def _list(flags_of_script: dict[str, bool], skip: bool) -> str:
    return ", ".join(f"`{flag}`" for flag, can in flags_of_script.items() if can is skip)


if __name__ == "__main__":
    print(page(), end="")
