"""The page of all flags, docs/mindspeed_flags.md, written from the table."""

from __future__ import annotations

from collections import Counter

from mindspeed_fx.megatron.flags.account import SKIP_FLAG, SKIP_VARIABLE
from mindspeed_fx.megatron.flags.flag import STATES, Flag
from mindspeed_fx.megatron.flags.table import SUBJECTS, TABLE, parent_of, state_of

HEAD = f"""# MindSpeed's flags

Every flag of MindSpeed (its parser of July 2026) and MindSpeed-LLM (August 2026): what it asks there and what becomes
of it here. `import mindspeed_fx.megatron_adaptor` puts them into Megatron-LM's parser (0.16); before Megatron checks
its arguments each flag of the run is done, and one line printed for it, or the run ends with one error that names all
flags that are not done and what to do instead. Nothing is silently ignored.

`mindspeed-fx flags -- ARGUMENTS` says it before a run (`--file ARGS.json` reads a list of words; status 1 where
something is refused), `mindspeed-fx flags` prints this table, `mindspeed-fx flags --page` this page.

A refused flag that changes memory or speed alone, marked *skip*, can be left aside without editing a script:
`{SKIP_FLAG} smart-swap compress-optimizer`, or `{SKIP_VARIABLE}=smart-swap,compress-optimizer`.

| state | meaning | flags |
|---|---|---|
"""

TESTS = """
Each row is shown by `test_effect[ROW]` of `tests/megatron/flags/test_effects.py`; where the mathematics of what is
handed to Megatron is compared, in `tests/megatron/flags/test_values.py`, the last column names that test.
"""


def page() -> str:
    """docs/mindspeed_flags.md."""
    counts = Counter(state_of(flag) for flag in TABLE)
    states = "".join(f"| {state} | {text} | {counts[state]} |\n" for state, text in STATES.items())
    tables = [f"\n## {subject}\n\n{_table(flags)}" for subject, flags in SUBJECTS.items()]
    return HEAD + states + TESTS + "".join(tables)


def _table(flags: list[Flag]) -> str:
    rows = ["| flag | asks | here | state | test |", "|---|---|---|---|---|", *map(_row, flags)]
    return "\n".join(rows) + "\n"


def _row(flag: Flag) -> str:
    parent = parent_of(flag)
    skip = " (*skip*)" if (parent or flag).skip else ""
    answer = flag.answer if parent is None else f"as `{parent.key}`"
    asks = flag.asks if parent is None else "a setting of it"
    default = "" if flag.default in (None, False, "") or flag.action != "store" else f" (default {flag.default})"
    test = "`test_effect`" if flag.shown_by is None else f"`test_effect`, `{flag.shown_by}`"
    cells = [f"`{flag.key}`{default}", asks, answer, f"{state_of(flag)}{skip}", test]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def text() -> str:
    """The table for a terminal: flag, state, what becomes of it."""
    width = max(len(flag.key) for flag in TABLE)
    return "\n".join(
        f"{flag.key:<{width}}  {state_of(flag):<8}  {flag.answer}" for flags in SUBJECTS.values() for flag in flags
    )
