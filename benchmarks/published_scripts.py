"""The flags of the launch scripts behind rows of published runs, where a row names the script and says less than it.

    python -m benchmarks.published_scripts --clone MindSpeed-LLM --megatron Megatron-LM --table FILE ...

reads every script of the clone's tests, at the commit that a row of a table names and as it last was, and every example
of a pretraining at a commit of a table of runs that rows come from, lets bash resolve
its variables (``tests/megatron/launch/collect.py``), and writes the flags that the cost model reads or that make a row
another thing than pretraining to ``published_scripts.json``: "path" or "path@commit" -> [processes, flags]. Scripts
alone are read, no measurement. Of Megatron-LM's functional tests that a table names, the arguments of their
``model_config.yaml`` are read, for rows that state how many devices they ran on.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import re
import subprocess
import tempfile
from pathlib import Path

from mindspeed_fx.planning.predict.architecture import FLAGS, VOCABULARY, values_of
from mindspeed_fx.planning.predict.launch_flags import FUSED_FLAGS, NUMBERS, SIZES, SWITCHES

STORE = Path(__file__).with_name("published_scripts.json")
KEPT = frozenset(
    (*FLAGS, *VOCABULARY, *FUSED_FLAGS, *NUMBERS, *SIZES, *SWITCHES)
    + tuple(
        (
            "--swiglu --geglu --normalization --untie-embeddings-and-output-weights --position-embedding-type "
            "--use-rotary-position-embeddings --max-position-embeddings --n-shared-experts --noop-layers "
            "--use-mcore-models --make-vocab-size-divisible-by --recompute-granularity --recompute-method "
            "--context-parallel-algo --enable-recompute-layers-per-pp-rank --ulysses-degree-in-cp "
            "--moe-token-dispatcher-type --moe-tp-extend-ep --use-distributed-optimizer --use-custom-fsdp "
            "--use-torch-fsdp2 --sequence-parallel --bf16 --fp16 --hidden-dropout --grad-reduce-in-bf16 "
            "--gemm-gradient-accumulation-fusion --no-gradient-accumulation-fusion --swap-attention --swap-optimizer "
            "--output-layer-slice-num --moe-zero-memory --moe-zero-memory-num-layers --mtp-mem-efficient-logits "
            "--recompute-norm --recompute-norm-num-layers --use-mc2 --num-layer-list --schedules-method "
            "--moe-fb-overlap --stage --qlora --tp-2d --enable-high-availability --variable-seq-lengths "
            "--no-pad-to-seq-lengths --neat-pack --padded-samples --reset-position-ids --is-instruction-dataset "
            "--is-pairwise-dataset --o2-optimizer --o2-gradient --share-kvstates --cla-share-factor --enable-mhc "
            "--enable-dsa-indexer --embed-layernorm --cp-attention-mask-type --attention-mask-type "
            "--adaptive-cp-manually-set-mask-list --profile --npu-deterministic --lora-target-modules --lora-fusion "
            "--moe-grouped-gemm --full-attention-interval --mamba-d-state --mamba-state-dim "
            "--moe-expert-capacity-factor --qk-layernorm --add-qkv-bias --disable-bias-linear --no-bias-gelu-fusion "
            "--squared-relu"
        ).split()
    )
)
FUNCTIONAL = re.compile(r"Megatron-LM (tests/functional_tests/test_cases/(?:gpt|moe|mixtral)/\S+)/golden_values")
SCRIPT = re.compile(r"@([0-9a-f]+)\b.*; script (\S+\.sh)")


@functools.cache
def scripts() -> dict[str, list]:
    return json.loads(STORE.read_text()) if STORE.exists() else {}


def launch_of(source: str) -> tuple[int, list[str]] | None:
    """Processes and flags of the script that a row's source names; None where it names none that is known."""
    entry = None
    if (match := SCRIPT.search(source)) is not None:
        commit, path = match.groups()
        entry = scripts().get(f"{path}@{commit}") or scripts().get(path)
    elif (match := FUNCTIONAL.search(source)) is not None:
        entry = scripts().get(match[1])
    return (entry[0], entry[1].split()) if entry else None


def kept_flags(words: list[str]) -> str:
    """The words of a launch that are kept, as one line."""
    pairs = (f"{flag} {value}".strip() for flag, value in sorted(values_of(words).items()) if flag in KEPT)
    return " ".join(pairs)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clone", required=True, help="git directory of a clone with its history")
    parser.add_argument("--megatron", help="git directory of a clone of Megatron-LM")
    parser.add_argument("--table", action="append", default=[], metavar="FILE", help="table whose rows name scripts")
    options = parser.parse_args(args)
    git = functools.partial(_git, options.clone)
    wanted = dict.fromkeys((path, "") for path in git("log", "--format=", "--name-only", "--", "tests/*.sh").split())
    result: dict[str, list] = {}
    for table in options.table:
        with open(table, newline="") as file:
            rows = list(csv.DictReader(file))
        if options.megatron:
            result |= _functional_tests(functools.partial(_git, options.megatron), rows)
        matches = [SCRIPT.search(row["source"]) for row in rows]
        wanted |= dict.fromkeys((m[2], m[1]) for m in matches if m and m[2].startswith("tests/"))
        for commit in dict.fromkeys(m[1] for m in matches if m and m[2].startswith("examples/")):
            paths = git("ls-tree", "-r", "--name-only", commit, "examples").split("\n")
            wanted |= dict.fromkeys((p, commit) for p in paths if re.search(r"/pretrain[^/]*\.sh$", p))
    for path, commit in sorted(wanted):
        entry = _read(git, path, commit)
        if entry and path.startswith("examples/"):
            result.setdefault(path, entry)  # the first commit's, beside which others are kept where they differ
        if entry and (not commit or entry != result.get(path)):
            result[f"{path}@{commit}" if commit else path] = entry
    lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in result.items()]
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _git(clone: str, *words: str) -> str:
    run = subprocess.run(["git", f"--git-dir={clone}", *words], capture_output=True)
    return run.stdout.decode(errors="replace") if run.returncode == 0 else ""


def _functional_tests(git, rows: list[dict[str, str]]) -> dict[str, list]:
    result = {}
    for row in rows:
        match, devices = FUNCTIONAL.search(row["source"]), re.search(r"gpus=(\d+);", row["shape_or_config"])
        if match is None or devices is None or "layers=" not in row["shape_or_config"]:
            continue
        text = git("show", f"HEAD:{match[1]}/model_config.yaml")
        pairs = re.findall(r"^  (--[\w-]+): *(\S+)$", text, re.M)
        words = [w for flag, value in pairs if value != "false" for w in (flag, *([value] if value != "true" else []))]
        result[match[1]] = [int(devices[1]), kept_flags(words)]
    return result


def _read(git, path: str, commit: str) -> list | None:
    from tests.megatron.launch.collect import resolve

    text = git("show", f"{commit}:{path}") if commit else ""
    if not text:  # as it last was
        last = git("log", "-1", "--format=%h", "--diff-filter=AMR", "--", path).strip()
        text = git("show", f"{last}:{path}") if last else ""
    if not text or "--num-layers" not in text and "MODEL_ARGS" not in text:
        return None
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, Path(path).name)
        script.write_text(text)
        try:
            runs = resolve(script, entries=("pretrain", "posttrain", "train"))
        except subprocess.TimeoutExpired:
            return None
    # Tests that convert a checkpoint first train last.
    run = next((r for r in reversed(runs.values()) if "--num-layers" in r["args"]), None)
    return [run["world"], kept_flags(run["args"])] if run else None


if __name__ == "__main__":
    main()
