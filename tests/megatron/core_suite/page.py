"""The page of runs of Megatron-core's tests: counts by file, what was skipped and why, and failures by cause."""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.megatron.core_suite import results, session
from tests.megatron.core_suite.results import Result

CAUSES = (
    results.Cause(
        "needs more ranks than the run has",
        r"world_size \(\d+\) is not divisible|over sized with world size|world size.*(greater|larger|require)|GPUs",
    ),
    results.Cause("time was over", "", outcome="late"),
    results.Cause("time was over", r"Timeout \(>"),
    results.Cause(
        "needs TransformerEngine",
        r"transformer_engine|Transformer ?Engine|TE[A-Z]\w+'? is not|Mock object has no attribute|MagicMock found",
    ),
    results.Cause("needs TransformerEngine", r"Expected value to be not None", r"typed_torch"),
    results.Cause(
        "needs TransformerEngine's layers: Megatron's local ones want a group that the test does not name",
        r"KeyError: 'dp_cp_group'",
    ),
    results.Cause(
        "counts or names the weights of TransformerEngine's layers, whose linears hold the norm before them",
        r"assert \d+ == \d+|input_layernorm",
        r"test_attention\.py|test_transformer_layer\.py",
    ),
    results.Cause(
        "writes in place into what Megatron's local linear returns, a view in eager mode",
        r"is a view and is being modified inplace",
        r"",
    ),
    results.Cause("needs TransformerEngine", r"install TE >="),
    results.Cause("needs TransformerEngine", r"'NoneType' object is not callable", r"transformer_block\.py:508"),
    results.Cause("torch logs a record of its own, and the test wants none", r"dcp_logger"),
    results.Cause("needs Triton", r"triton"),
    results.Cause("needs CUDA graphs", r"cudagraphs"),
    results.Cause(
        "measures CUDA's allocator; of a CPU the process's bytes are known", r"1048576", r"test_fully_parallel"
    ),
    results.Cause(
        "ranks write into a folder that rank 0 may not have made yet: the test does not wait",
        r"Parent directory .*tmp_dist_ckpt does not exist",
    ),
    results.Cause("Megatron's own FSDP is for CUDA", r"Invalid device string", r"mcore_fsdp_adapter"),
    results.Cause("asks where CUDA's memory is", r"\.is_cuda|device type|assert.*cuda"),
    results.Cause("needs CUDA", r"not compiled with CUDA|No NVIDIA|CUDA_HOME|_cuda_"),
    results.Cause("needs another package", r"No module named|Grouped GEMM is not available"),
    results.Cause("the test relies on one that ran before it", r"args is not initialized"),
    results.Cause(
        "a rank failed before, and the others wait",
        r"Connection closed by peer|Timed out waiting|wait timeout|Broken pipe",
    ),
    results.Cause("gloo gathers tensors of one shape alone", r"allgather: invalid tensor size"),
    results.Cause(
        "the CPU's generator is the device's: one seed for both", r"torch\.equal", r"test_initialization\.py"
    ),
    results.Cause("asks for equal bits of sums over other numbers of rows", r"torch\.equal", r"test_aux_loss\.py"),
)
COLUMNS = ("passed", "skipped", "failed", "late")


def write(folders: list[Path], date: str) -> str:
    """The page of the runs whose records lie in ``folders``."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("megatron-core", "torch"))
    lines = [
        "# Megatron-core's own unit tests",
        "",
        f"{date}; {versions}, without TransformerEngine, Apex and Triton; CPU, gloo. Made by "
        "`python -m tests.megatron.core_suite CHECKOUT FILES --page docs/megatron_core_tests.md` from Megatron-LM's "
        "repository at core_v0.16.1, whose tests are no part of this repository.",
        "",
        INTRODUCTION,
        *("", "Not begun, for over gloo it waits for ever:", ""),
        *(f"- {test}: {reason}" for test, reason in session.ENDLESS.items()),
    ]
    for folder in folders:
        request = json.loads((folder / "request.json").read_text())
        lines += ["", *_of_run(results.read(folder), request)]
    return "\n".join(lines) + "\n"


INTRODUCTION = (
    "The tests are run as they are, through the adaptor. To test modules alone `torch.cuda.is_available()` is true, "
    "\"cuda\" is the CPU, nccl is gloo, and specs of TransformerEngine's layers are those of Megatron's local layers. "
    "Many tests are written for eight ranks; their processes share two cores here. A file that had not ended in its "
    "time was stopped, and what it had not begun by then is not counted."
)


def _of_run(tests: list[Result], request: dict) -> list[str]:
    total = Counter(_column(t) for t in tests)
    ranks = f"{request['world']} rank{'s' if request['world'] > 1 else ''}"
    how = "models and layers compiled" if request["compile"] else "eager"
    lines = [f"## {ranks}, {how}", "", ", ".join(f"{total[c]} {c}" for c in COLUMNS) + ".", ""]
    lines += ["| file | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test in tests:
        counts[test.file][_column(test)] += 1
    lines += [f"| {file} | {' | '.join(str(c[k] or '') for k in COLUMNS)} |" for file, c in sorted(counts.items())]
    lines += ["", "| failed or late because | tests | files |", "|---|---|---|"]
    causes: dict[str, list[Result]] = defaultdict(list)
    for test in tests:
        if _column(test) in ("failed", "late"):
            causes[results.cause_of(test, CAUSES)].append(test)
    for cause, group in sorted(causes.items(), key=lambda c: -len(c[1])):
        lines.append(f"| {cause} | {len(group)} | {', '.join(sorted({t.file for t in group}))} |")
    lines += ["", "| skipped by its own mark: what it says | tests |", "|---|---|"]
    skips = Counter(_cell(t.text.removeprefix("Skipped: "), 100) for t in tests if t.outcome == "skipped")
    lines += [f"| {text} | {n} |" for text, n in skips.most_common()]
    unexplained = causes.get(results.UNEXPLAINED, [])
    if unexplained:
        lines += ["", "| unexplained | error |", "|---|---|"]
        lines += [f"| {t.file}::{t.name} | {_cell(t.text, 160)} |" for t in unexplained]
    return lines


def _column(test: Result) -> str:
    return {"xfailed": "passed", "xpassed": "passed"}.get(test.outcome, test.outcome)


def _cell(text: str, length: int) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first[:length].replace("|", "\\|")
