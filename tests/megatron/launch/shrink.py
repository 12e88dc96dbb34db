"""A launch script's arguments made small: fewer layers, narrower, fewer experts and ranks, mock data; every flag of a
feature stays, and ratios (heads to groups, first dense layers, virtual stages, experts to groups) where they can.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
COLLECTIONS = ("mindspeed", "mindspeed_llm")

DROP = frozenset(
    """--data-path --tokenizer-model --tokenizer-name-or-path --tokenizer-padding-side --vocab-file --merge-file --load
    --save --split --save-interval --tensorboard-dir --exit-interval --lr-decay-iters --workers
    --padded-vocab-size --max-batch-size --auto-detect-ckpt-format --exit-on-missing-checkpoint --finetune
    --no-load-optim --no-load-rng --no-save-optim --no-save-rng --ckpt-format --mock-data --use-cpu-initialization
    --distributed-timeout-minutes --hf-cfg-dir --yaml-cfg --skip-train --lr-warmup-iters --vocab-size
    --initial-loss-scale""".split()
)
"""Flags of a run's data, length and checkpoints, which have tests of their own."""
FSDP2 = "--fsdp2-config-path"
SETTINGS = {"": HERE / "fsdp2.yaml", "fp32": HERE / "fsdp2_fp32.yaml"}
"""Of torch's FSDP2, whose file the scripts leave out, by type."""
LAYERZERO = "--layerzero-config"
LAYERZERO_SETTINGS = {"": HERE / "layerzero.yaml", "fp32": HERE / "layerzero_fp32.yaml"}
"""The same of LayerZeRO."""


@dataclass
class Script:
    """One launch script.

    Args:
        name: of the script.
        entry: the file that torchrun starts.
        world: processes.
        args: its command line.
    """

    name: str
    entry: str
    world: int
    args: list[str]


def scripts(collection: str, folder: Path = HERE) -> list[Script]:
    """All scripts of a collection (``COLLECTIONS``, or another file of that form in ``folder``)."""
    data = json.loads((folder / f"{collection}.json").read_text())
    return [Script(name, s["entry"], s["world"], s["args"]) for name, s in data.items()]


class Arguments(dict[str, list[str]]):
    """A command line by its flags."""

    @classmethod
    def parse(cls, args: list[str]) -> Arguments:
        result, flag = cls(), ""
        for word in args:
            if word.startswith("--"):
                flag = word
                result[flag] = []
            else:
                result[flag].append(word)
        return result

    def number(self, flag: str, default: int = 1) -> int:
        return int(self[flag][0]) if flag in self else default

    def lower(self, flag: str, limit: int) -> None:
        """At most ``limit``, where the flag is given."""
        if flag in self:
            self[flag] = [str(min(self.number(flag), limit))]

    def put(self, flag: str, *values: object) -> None:
        self[flag] = [str(v) for v in values]

    def replace(self, flag: str, *values: object) -> None:
        """The same, where the flag is given."""
        if flag in self:
            self.put(flag, *values)

    def line(self) -> list[str]:
        return [word for flag, values in self.items() for word in (flag, *values)]


@dataclass
class Mesh:
    """Degrees of parallelism of the small run."""

    tp: int
    pp: int
    cp: int
    ep: int
    stages: int
    dp: int

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


def shrink(script: Script, dtype: str = "") -> tuple[list[str], int]:
    """(arguments, processes) of a small run.

    Args:
        dtype: "fp32" leaves ``--bf16`` and ``--fp16`` away; "" keeps them.
    """
    args = Arguments.parse(script.args)
    mesh = _mesh(args)
    layers = _layers(args, mesh)
    _widths(args, mesh)
    _experts(args, mesh, layers)
    _run(args, mesh)
    for flag in DROP:
        args.pop(flag, None)
    args.replace(FSDP2, SETTINGS[dtype])
    args.replace(LAYERZERO, LAYERZERO_SETTINGS[dtype])
    args.put("--mock-data")
    args.put("--vocab-size", 255)
    if dtype == "fp32":
        args.pop("--bf16", None)
        args.pop("--fp16", None)
    return args.line(), mesh.world


def _mesh(args: Arguments) -> Mesh:
    tp = min(args.number("--tensor-model-parallel-size"), 4 if "--tp-2d" in args else 2)
    pp = args.number("--pipeline-model-parallel-size")
    algorithm = "".join(args.get("--context-parallel-algo", []))
    cp = min(args.number("--context-parallel-size"), 4 if _two_level(args, algorithm) else 2)
    ep = min(args.number("--expert-model-parallel-size"), 2)
    layers, per_stage = args.number("--num-layers", 4), args.number("--num-layers-per-virtual-pipeline-stage", 0)
    stages = layers // (pp * per_stage) if per_stage else 1
    small_pp = min(pp, 4 if tp * cp == 1 else 2)
    expert_tp = args.number("--expert-tensor-parallel-size", tp)
    dp = max(1, -(-ep * expert_tp // (tp * cp)))
    if tp * cp * small_pp <= 2 and dp == 1:
        dp = 2
    for flag, size in (("--tensor", tp), ("--pipeline", small_pp), ("--context", cp), ("--expert", ep)):
        name = f"{flag}-parallel-size" if flag == "--context" else f"{flag}-model-parallel-size"
        args.replace(name, size)
    return Mesh(tp, small_pp, cp, ep, max(1, min(stages, 2)), dp)


def _two_level(args: Arguments, algorithm: str) -> bool:
    return "hybrid" in algorithm or args.number("--cp-window-size") > 1


def _layers(args: Arguments, mesh: Mesh) -> int:
    virtual = "--num-layers-per-virtual-pipeline-stage" in args
    layers = mesh.pp * mesh.stages * (1 if virtual or mesh.pp > 2 else 2)
    args.put("--num-layers", layers)
    args.replace("--num-layers-per-virtual-pipeline-stage", 1)
    if "--noop-layers" in args:
        ends = {n for n in args["--noop-layers"][0].split(",") if n == "0"}
        args.put("--noop-layers", ",".join([*ends, str(layers - 1)] if layers > 2 else [str(layers - 1)]))
    args.replace("--num-layer-list", ",".join([str(layers // mesh.pp)] * mesh.pp))
    args.replace("--pipeline-num-transformer-layers", _unequal_layers(layers, mesh))
    args.lower("--mtp-num-layers", 1)
    per_chunk = layers // (mesh.pp * mesh.stages)
    for flag in ("", "activation-function-", "norm-"):
        args.lower(f"--recompute-{flag}num-layers", per_chunk)
    if "--compress-ratios" in args:
        kinds = list(dict.fromkeys(args["--compress-ratios"]))  # one layer of each before another of the same
        again = [r for r in args["--compress-ratios"] if r != "0"]
        args.put("--compress-ratios", *(min(int(r), 16) for r in [*kinds, *again][:layers]))
    return layers


def _unequal_layers(layers: int, mesh: Mesh) -> str:
    """As many layers on the stages as there are, one moved from the last to the first."""
    counts = [[layers // (mesh.pp * mesh.stages)] * mesh.stages for _ in range(mesh.pp)]
    counts[0][0] += 1
    counts[-1][-1] -= 1
    return str(counts).replace(" ", "")


def _widths(args: Arguments, mesh: Mesh) -> None:
    heads, groups = args.number("--num-attention-heads", 8), args.number("--num-query-groups", 0)
    ratio = min(max(1, heads // groups), 4) if groups else 1
    small_groups = mesh.tp * mesh.cp
    while small_groups * ratio < 4:
        small_groups *= 2
    if "--unaligned-linear" in args and (groups or heads) % mesh.tp:
        small_groups += 1
    args.put("--num-attention-heads", small_groups * ratio)
    args.replace("--num-query-groups", small_groups)
    divides = 64 % (small_groups * ratio) == 0 or "--kv-channels" in args
    args.put("--hidden-size", 64 if divides else small_groups * ratio * 8)
    args.replace("--ffn-hidden-size", 128)
    args.replace("--kv-channels", 16)
    lengths = {"--q-lora-rank": 32, "--kv-lora-rank": 16, "--qk-head-dim": 16, "--qk-pos-emb-head-dim": 8}
    for flag, width in (lengths | {"--v-head-dim": 16, "--index-head-dim": 16}).items():
        args.replace(flag, width)
    for flag in ("--index-n-heads", "--index-topk"):
        args.lower(flag, 8)
    for flag in ("--linear-key-head-dim", "--linear-value-head-dim"):
        args.lower(flag, 16)
    for flag in ("--linear-num-key-heads", "--linear-num-value-heads"):
        args.lower(flag, 4)
    width = args.number("--kv-channels", args.number("--hidden-size") // args.number("--num-attention-heads"))
    for flag in ("--short-factor", "--long-factor"):
        if flag in args:  # one for every second channel of a head
            args.put(flag, ",".join(args[flag][0].split(",")[: width // 2]))
    args.lower("--full-attention-interval", 2)
    args.put("--seq-length", 64)
    args.put("--max-position-embeddings", 64)
    args.lower("--rope-scaling-original-max-position-embeddings", 16)
    args.lower("--interleave-sliding-window", 16)
    args.lower("--sliding-window-size", 16)
    for flag in ("--img-h", "--img-w"):
        args.lower(flag, 2 * args.number("--patch-dim"))
    args.lower("--o-groups", 2 * mesh.tp)
    args.lower("--o-lora-rank", 16)


def _experts(args: Arguments, mesh: Mesh, layers: int) -> None:
    if "--num-experts" not in args:
        return
    groups = args.number("--moe-router-num-groups")
    experts = min(args.number("--num-experts"), 8 if groups == 1 else 16)
    args.put("--num-experts", experts)
    args.lower("--moe-router-num-groups", 4)
    args.lower("--moe-router-group-topk", 2)
    args.lower("--moe-router-topk", 2 if experts < 8 else 4)
    ratio = 1
    if "--moe-ffn-hidden-size" in args and "--moe-shared-expert-intermediate-size" in args:
        own, shared = (args.number(f"--moe-{n}") for n in ("ffn-hidden-size", "shared-expert-intermediate-size"))
        ratio = min(max(1, shared // own), 2)
    args.replace("--moe-ffn-hidden-size", 32)
    args.replace("--moe-shared-expert-intermediate-size", 32 * ratio)
    args.lower("--num-zero-experts", experts)
    args.lower("--first-k-dense-replace", 1)
    args.lower("--n-hash-layers", 1)
    if "*" in "".join(args.get("--moe-layer-freq", [])):
        args.put("--moe-layer-freq", f"[0]*1+[1]*{layers - 1}")


def _run(args: Arguments, mesh: Mesh) -> None:
    args.lower("--micro-batch-size", 2)
    microbatches = max(2, mesh.pp * (2 if "--schedules-method" in args else 1))
    args.put("--global-batch-size", args.number("--micro-batch-size") * mesh.dp * microbatches)
    args.put("--train-iters", 3)
    args.put("--eval-iters", 0)
    args.put("--log-interval", 1)
    args.put("--num-workers", 0)
    args.put("--tokenizer-type", "NullTokenizer")
