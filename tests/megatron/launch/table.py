"""docs/launch_scripts.md: every launch script made small, run compiled and eager over gloo, and compared.

    python -m tests.megatron.launch.table [--only PART-OF-NAME ...] [--flags] [--again] [--narrow] [--write]

A script whose flags are refused is made to go on without those that may be skipped; one with others is not run, and
the table says which.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.megatron.launch import runner, shrink

PAGE = Path(__file__).parents[3] / "docs" / "launch_scripts.md"
RESULTS = Path(__file__).parent / "results.json"
NPU_RESULTS = Path(__file__).parent / "npu_results.json"
"""What npu_trace.py prints."""
EAGER = {"MINDSPEED_FX_COMPILE": "0"}
COMPILED = {"MINDSPEED_FX_OPTIONS": '{"codegen": "eager"}'}
TOLERANCE = 1e-5
NARROW_FLOOR = 1e-6
"""Ten times what two runs in float32 differ by."""
LOSS_SCALE = 1024
"""Of float16 runs: with Megatron's first scale, 2**32, the three steps are skipped and nothing is compared."""
SECONDS = 900
"""A run's limit: eight processes on two cores compile for minutes."""
ENTRIES = ("pretrain_gpt.py", "pretrain_gpt_llm.py", "pretrain_deepseek4.py")
"""Entry scripts whose arguments are run through Megatron-LM's pretrain_gpt.py."""
YAML = (
    "its file is of an older Megatron-LM: 0.16.1 reads arguments that it lacks (enable_msc, skipped_train_samples and "
    "others); a file that has them trains (test_a_file_of_arguments_trains_as_the_words_do)"
)
KINDS = r"^[\w.]*(Error|Exception|refused|Unsupported)"


@dataclass
class Row:
    """One script in the table.

    Args:
        name: of the script.
        world: processes of the small run.
        skipped: flags it goes on without.
        refused: what keeps it from running, one line each.
        graphs: compiled on each rank.
        chunks: of the model on each rank.
        difference: the largest relative difference of a loss or gradient norm between compiled and eager.
        error: the last lines of a run that failed.
        eager: losses and gradient norms of the eager run, by "iteration name".
        narrow: the script's own 16-bit type: the largest relative distance of a loss from ``eager``, of the eager and
            of the compiled run in that type, and the same of the gradient norms.
        narrow_error: the last line of a run in that type that failed.
        is_recomputed_early: --recompute-in-advance or --recompute-in-bubble.
        has_variable_lengths: --variable-seq-lengths, through an entry script whose lengths vary.
        parts: that a chunk is compiled in: the encoder, the projection and the language model of one for images.
    """

    name: str
    world: int = 0
    skipped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    difference: float | None = None
    error: str = ""
    eager: dict[str, float] = field(default_factory=dict)
    narrow: list[float] = field(default_factory=list)
    narrow_error: str = ""
    is_recomputed_early: bool = False
    has_variable_lengths: bool = False
    parts: int = 1

    @property
    def narrow_passes(self) -> bool:
        """In 16 bits: compiled at most twice as far from float32 as eager, in losses and in gradient norms."""
        pairs = list(zip(self.narrow[::2], self.narrow[1::2]))
        return len(pairs) == 2 and all(c <= 2 * e + NARROW_FLOOR < math.inf for e, c in pairs)

    @property
    def passes(self) -> bool:
        """Equal, and one graph for every chunk."""
        return not self.error and self.difference is not None and self.difference <= TOLERANCE and self.one_graph

    @property
    def was_run(self) -> bool:
        return bool(self.error or self.graphs)

    @property
    def result(self) -> str:
        """In a word or two."""
        if self.passes:
            return "equal"
        if self.refused:
            return "refused"
        if not self.was_run:
            return "not run"
        return "fails" if self.error else "differs"

    @property
    def one_graph(self) -> bool:
        """No chunk in several graphs; chunks of a rank that are alike may share one.

        A chunk that is recomputed early has a second, which keeps nothing; one whose lengths vary has a second, for
        any length, after that of the first.
        """
        pairs = list(zip(self.graphs, self.chunks))
        most = 2 if self.is_recomputed_early or self.has_variable_lengths else self.parts
        return bool(pairs) and len(self.graphs) == len(self.chunks) and all(0 < g <= most * c for g, c in pairs)


def refusals(args: list[str]) -> tuple[list[str], list[str]]:
    """(flags to skip, lines of those refused all the same) of a command line."""
    if str(runner.checkout()) not in sys.path:
        sys.path.insert(0, str(runner.checkout()))
    from mindspeed_fx.megatron import flags

    refused = [a for a in flags.explain(args) if a.is_refused]
    skipped = [a.flag for a in refused if a.flag in flags.BY_KEY and flags.BY_KEY[a.flag].skip]
    return skipped, [str(a) for a in flags.explain(with_skips(args, skipped)) if a.is_refused]


def with_skips(args: list[str], skipped: list[str]) -> list[str]:
    return [*args, "--mindspeed-skip-flags", *(flag.lstrip("-") for flag in skipped)] if skipped else args


def measure(script: shrink.Script, *, runs: bool = True) -> Row:
    """Run a script both ways, in float32; without ``runs`` its flags alone are looked at."""
    args, world = shrink.shrink(script, "fp32")
    row = Row(script.name, world)
    row.skipped, row.refused = refusals(args)
    if script.entry not in ENTRIES and not (runner.ENTRIES / script.entry).exists():
        row.refused.append(f"its entry script {script.entry} is not Megatron-LM's pretrain_gpt.py")
    if "--yaml-cfg" in script.args:
        row.refused.append(YAML)
    if row.refused or not runs:
        return row
    args = with_skips(args, row.skipped)
    eager = runner.run(args, world, entry=entry_of(script), environ=EAGER | environ_of(args), seconds=SECONDS)
    if eager.error is not None:
        row.error = _last_line(eager.error, "eager")
        if row.error.startswith("eager: ValueError: --"):  # ours, when the model is built: it names a flag
            row.refused, row.error = [row.error.removeprefix("eager: ValueError: ")], ""
        return row
    row.eager = values_of(eager)
    return compare(row, args, entry_of(script))


def entry_of(script: shrink.Script) -> str:
    """The file that is started: Megatron-LM's pretrain_gpt.py, or one of the folder ``entries``."""
    return ENTRIES[0] if script.entry in ENTRIES else script.entry


def environ_of(args: list[str]) -> dict[str, str]:
    """What a script's environment has beside what every run is given."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "8"} if "--use-torch-fsdp2" in args else {}  # Megatron refuses 1 there


def compare(row: Row, args: list[str], entry: str = ENTRIES[0]) -> Row:
    """Run compiled, and fill ``row`` with what that gives beside its eager values."""
    compiled = runner.run(args, row.world, entry=entry, environ=COMPILED | environ_of(args), seconds=SECONDS)
    row.graphs, row.chunks = compiled.graphs, compiled.chunks
    row.is_recomputed_early = bool({"--recompute-in-advance", "--recompute-in-bubble"} & {*args})
    row.has_variable_lengths = "--variable-seq-lengths" in args and entry not in ENTRIES
    row.parts = 3 if "--img-h" in args else 1
    row.error = _last_line(compiled.error, "compiled")
    row.difference = None if row.error else largest_difference(row.eager, values_of(compiled))
    return row


def measure_narrow(row: Row, script: shrink.Script) -> Row:
    """Run a script that is equal in float32 in its own type, and fill ``row.narrow``."""
    args, world = shrink.shrink(script)
    if not has_narrow_type(script):
        return row
    if "--fp16" in args:
        args += ["--initial-loss-scale", str(LOSS_SCALE)]
    row.narrow, row.narrow_error, runs = [], "", []
    for which, environ in (("eager", EAGER), ("compiled", COMPILED)):
        environ = environ | environ_of(args)
        run = runner.run(with_skips(args, row.skipped), world, entry=entry_of(script), environ=environ, seconds=SECONDS)
        if run.error is not None:
            row.narrow_error = _last_line(run.error, which)
            return row
        runs.append(values_of(run))
    for is_norm in (False, True):
        exact, *values = ({k: v for k, v in x.items() if ("norm" in k) == is_norm} for x in (row.eager, *runs))
        row.narrow += [largest_difference(exact, x) for x in values]
    return row


def has_narrow_type(script: shrink.Script) -> bool:
    """It trains in bfloat16 or float16."""
    return bool({"--bf16", "--fp16"} & set(script.args))


def largest_difference(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest relative difference of a value; infinite where one lacks what the other has."""
    if one.keys() != other.keys() or not one:
        return float("inf")
    return max(abs(a - other[k]) / max(abs(a), 1e-12) for k, a in one.items())


def values_of(run: runner.Run) -> dict[str, float]:
    """Losses and gradient norms by "iteration name"."""
    losses = {f"{i} {name}": v for i, by_name in run.losses.items() for name, v in by_name.items()}
    return losses | {f"{i} gradient norm": v for i, v in run.grad_norms.items()}


def _last_line(error: str | None, which: str) -> str:
    if error is None:
        return ""
    lines = [x.strip() for x in error.splitlines() if re.match(KINDS, x.strip())]
    return f"{which}: {(lines or error.strip().splitlines())[-1][:200]}"


def page(rows: list[Row]) -> str:
    """The table as the page has it."""
    counts = collections.Counter(r.result for r in rows)
    lines = [
        "# Launch scripts",
        "",
        "The launch scripts of MindSpeed's system tests and of MindSpeed-LLM's examples, made small (layers, widths,",
        "experts, lengths, ranks; mock data; every flag of a feature stays: tests/megatron/launch/shrink.py) and run",
        "through Megatron-LM 0.16.1's pretrain_gpt.py with `import mindspeed_fx.megatron_adaptor` as first line, over",
        "gloo, three iterations in float32, compiled (`codegen` eager) and eager; nothing ran on an NPU. Made by",
        "`python -m tests.megatron.launch.table --write`. Equal: losses and gradient norms of every iteration within",
        "1e-5, and one graph for every chunk (two where lengths vary: of the first length and of any; three of images",
        "with texts, joined by data: encoder, projection, language model). Entry scripts other than pretrain_gpt.py",
        "are written anew (tests/megatron/launch/entries). 16 bits: the script's own bfloat16",
        "or float16 with float32 main weights, the largest relative distance of a loss, and of a gradient norm, from",
        "the float32 run, eager and compiled (compiled at most twice eager's, and 1e-6).",
        "",
        ", ".join(f"{'**' * (k == 'equal')}{counts[k]} {k}{'**' * (k == 'equal')}" for k in sorted(counts)) + ".",
        "",
        "| script | ranks | result | graphs for chunks | largest difference | 16 bits | flags left away |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        result = r.result
        graphs = f"{sum(r.graphs)} for {sum(r.chunks)}" if r.graphs else ""
        difference = "" if r.difference is None else f"{r.difference:.1e}"
        notes = ", ".join(f"`{f}`" for f in r.skipped) if not r.refused else "; ".join(r.refused)
        notes = f"{r.error} {notes}".strip().replace("|", "\\|").replace("\n", " ")
        narrow = r.narrow_error or "; ".join(f"{e:.1e}, {c:.1e}" for e, c in zip(r.narrow[::2], r.narrow[1::2]))
        lines.append(f"| {r.name} | {r.world} | {result} | {graphs} | {difference} | {narrow} | {notes} |")
    lines += _npu_lines(json.loads(NPU_RESULTS.read_text()))
    return "\n".join(lines) + "\n"


def _npu_lines(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = [
        "",
        "## On fake NPU tensors",
        "",
        "Chunks of the first and the last rank of each script, in its own type, compiled forward and backward through",
        "torch_npu on fake tensors (traced, not run; tests/megatron/launch/npu_trace.py). Fused: operators that passes",
        "found; all are lowered to torch_npu's. Waits: numbers that the host reads, the counts of rows for experts.",
        "",
        "| script | rank, stage | fused | calls of torch_npu's operators | collectives | waits |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        for row in rows:
            counts = [str(sum(row[key].values())) for key in ("fused", "npu", "collectives", "waits")]
            lines.append(f"| {name} | {row['rank']}, {row['stage']} | {' | '.join(counts)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--again", action="store_true", help="also scripts that have a result")
    parser.add_argument("--narrow", action="store_true", help="run what is equal in its own 16-bit type")
    parser.add_argument("--flags", action="store_true", help="look at flags alone, and run nothing")
    given = parser.parse_args()
    scripts = [s for collection in shrink.COLLECTIONS for s in shrink.scripts(collection)]
    asked = [s for s in scripts if any(part in s.name for part in given.only)]
    for script in sorted(asked, key=lambda s: shrink.shrink(s)[1]) if given.narrow else asked:
        row = load().get(script.name)
        if given.narrow:
            if row is None or not row.passes or not has_narrow_type(script) or (row.narrow and not given.again):
                continue
            row = measure_narrow(row, script)
            passes = row.narrow_passes
        else:
            if row is not None and (row.passes or given.flags) and not given.again:
                continue
            row = measure(script, runs=not given.flags)
            passes = row.passes
        print("equal" if passes else "NOT", asdict(row), flush=True)
        known = load() | {script.name: row}  # another process may have written since
        RESULTS.write_text(json.dumps([asdict(r) for r in known.values()], indent=1) + "\n")
    if given.write:
        known = load()
        PAGE.write_text(page([known[s.name] for s in scripts if s.name in known]))


def load() -> dict[str, Row]:
    """What was measured, by name of script."""
    return {r["name"]: Row(**r) for r in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
