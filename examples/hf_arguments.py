"""Arguments of train_hf.py, and every option of the backend."""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

import backend_options
import torch

RESUME = ("model", "kind", "config", "from_pretrained", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn",
          "experts", "experts_per_token", "expert_ffn", "window", "set", "dropout", "dtype", "seq_length", "buckets",
          "packed", "image_size", "batch_size", "steps", "lr", "min_lr", "warmup", "weight_decay", "clip", "betas",
          "seed")  # fmt: skip
"""What a run that goes on must have as it was."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


MODEL: dict[str, dict[str, Any]] = {
    "--model": dict(default="qwen3", help="architecture of transformers: qwen3, bert, t5, vit ...; default: qwen3"),
    "--kind": dict(choices=("causal", "masked", "seq2seq", "vision"), help="default: the architecture's own"),
    "--config": dict(metavar="FILE", help="a config.json; default: small sizes"),
    "--from-pretrained": dict(
        metavar="PATH", help="weights, configuration and tokenizer; default: random weights and bytes"
    ),
    **{
        f"--{name}": dict(type=int, metavar="N", help=f"default: {size}, or what --config says")
        for name, size in {
            "layers": 4, "hidden": 128, "heads": 4, "kv-heads": 2, "head-dim": 32, "ffn": 256, "experts": 4,
            "experts-per-token": 2, "expert-ffn": 64, "window": 64,
        }.items()
    },
    "--set": dict(nargs="+", metavar="NAME=JSON", help="other values of the configuration"),
    "--dropout": dict(type=float, help="every dropout of the configuration; default: as it is there"),
    "--dtype": dict(
        choices=tuple(DTYPES),
        help="of products, with main weights in float32 (float64: all); default: bfloat16 on an accelerator, else "
        "float32",
    ),
}  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
    "--data": dict(nargs="+", metavar="FILE", help="text; default: Python's standard library's source"),
    "--seq-length": dict(type=int, default=128, help="tokens in a row; default: 128"),
    "--packed": dict(
        action=argparse.BooleanOptionalAction,
        help="causal models: documents in a row do not see each other; default: where the model can",
    ),
    "--buckets": dict(
        type=int,
        nargs="+",
        metavar="LENGTH",
        help="a document a row, padded to the least of these lengths; each is compiled once",
    ),
    "--image-size": dict(type=int, default=32, help="default: 32"),
    "--workers": dict(type=int, default=0, help="processes that make batches ahead; default: 0"),
}
TRAINING: dict[str, dict[str, Any]] = {
    "--batch-size": dict(type=int, default=8, help="rows of a step, on all ranks together; default: 8"),
    "--accumulate": dict(type=int, metavar="N", help="microbatches of a step; default: 1, or the searched plan's"),
    "--steps": dict(type=int, default=200, help="default: 200"),
    "--lr": dict(type=float, default=1e-3, help="default: 1e-3"),
    "--min-lr": dict(type=float, default=1e-4, help="default: 1e-4"),
    "--warmup": dict(type=int, metavar="STEPS", help="default: a tenth of --steps"),
    "--weight-decay": dict(type=float, default=0.1, help="of matrices; default: 0.1"),
    "--betas": dict(type=float, nargs=2, default=(0.9, 0.95), help="of AdamW; default: 0.9 0.95"),
    "--clip": dict(type=float, default=1.0, help="largest norm of all gradients; 0: none; default: 1.0"),
    "--seed": dict(type=int, default=1, help="default: 1"),
    "--eval-every": dict(type=int, default=50, metavar="STEPS", help="default: 50"),
    "--eval-batches": dict(type=int, default=4, help="0: no validation; default: 4"),
    "--sample-length": dict(type=int, default=64, help="tokens of the sample at the end; 0: none; default: 64"),
    "--peak-tflops": dict(type=float, help="of one rank, for MFU; default: measured, by matrix products"),
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "--save": dict(metavar="FOLDER", help="default: runs/hf-MODEL"),
    "--save-every": dict(type=int, default=50, metavar="STEPS", help="default: 50"),
    "--async-save": dict(
        action=argparse.BooleanOptionalAction, default=True, help="write while training goes on; default: on"
    ),
    "--resume": dict(
        choices=("auto", "require", "never"),
        default="auto",
        help="go on from the last whole checkpoint under --save if there is one (auto) or in any case (require), or "
        "start anew and remove what is there (never); processes that torchrun starts again always go on; default: auto",
    ),
    "--stop-after": dict(type=int, metavar="STEP", help="save and end there"),
}
PLAN: dict[str, dict[str, Any]] = {
    "--devices": dict(default="auto", help="auto: all processes that torchrun started; a number must be theirs"),
    "--device": dict(choices=("cpu", "cuda", "npu"), help="default: the machine's accelerator, else cpu"),
    "--plan": dict(
        help="none, search, a name (zero2, zero3, tp, tp_sp, ulysses ..., joined by +; pp2: two stages of a pipeline), "
        "or the file of a saved plan; default: search, for one process none"
    ),
    "--pipeline": dict(action="store_true", help="--plan search considers stages of a pipeline too"),
    "--schedule": dict(
        metavar="NAME:N",
        help="of stages: a schedule of torch.distributed.pipelining and stages on a rank, as in Interleaved1F1B:2; "
        "default: the searched plan's, else 1F1B:1",
    ),
    "--mesh": dict(
        metavar="DIM=N,...", help="sizes of the mesh; default: all processes, as evenly as it goes, or searched"
    ),
    "--memory": dict(help="of a device, for --plan search: 60GiB; default: nine tenths of what it has"),
}
GROUPS = {"model": MODEL, "data": DATA, "training": TRAINING, "checkpoints": CHECKPOINTS, "plan": PLAN}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for title, table in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, settings in table.items():
            group.add_argument(name, **settings)
    compiler = parser.add_argument_group("compiler")
    compiler.add_argument("--backend", choices=("eager", "inductor", "mindspeed"), default="mindspeed")
    backend_options.add_arguments(compiler)
    return parser


def parse(description: str | None, words: list[str] | None = None) -> argparse.Namespace:
    """The arguments, checked; ``words``: the command line, by default that of the process."""
    return complete(make_parser(description).parse_args(words))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Defaults that depend on others, and checks."""
    args.world_size, args.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    args.options = backend_options.given(args, args.backend)
    if args.device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        args.device = accelerator.type if accelerator and accelerator.type in ("cuda", "npu") else "cpu"
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    args.plan = args.plan or ("none" if args.world_size == 1 else "search")
    args.save = args.save or f"runs/hf-{args.model}"
    args.betas = list(args.betas)
    if args.warmup is None:
        args.warmup = args.steps // 10
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Ends the run where arguments do not go together."""
    whole = ("seq_length", "image_size", "batch_size", "steps", "eval_every", "save_every", "layers", "hidden", "heads",
             "kv_heads", "head_dim", "ffn", "experts", "experts_per_token", "expert_ffn", "window", "accumulate",
             "stop_after")  # fmt: skip
    for name in whole:
        if (value := getattr(args, name)) is not None and value < 1:
            fail(f"{flag(name)} {value} is less than 1")
    for name in ("eval_batches", "sample_length", "workers", "clip", "seed", "warmup"):
        if getattr(args, name) < 0:
            fail(f"{flag(name)} {getattr(args, name)} is less than 0")
    if args.devices != "auto" and (not args.devices.isdigit() or int(args.devices) != args.world_size):
        number = args.devices if args.devices.isdigit() else "N"
        fail(
            f"--devices {args.devices}: there are {args.world_size} processes; give auto, or start them by torchrun "
            f"--nproc-per-node {number}"
        )
    if args.plan == "none" and args.world_size > 1:
        fail(
            f"--plan none: {args.world_size} processes would do the same; valid: search, a name, or a saved plan's file"
        )
    if args.plan != "none" and args.backend != "mindspeed":
        fail(f"--plan {args.plan} is what --backend mindspeed does, not --backend {args.backend}")
    if args.dropout is not None and not 0 <= args.dropout < 1:
        fail(f"--dropout {args.dropout}: 0 to 1, without 1, is expected")
    if args.min_lr > args.lr:
        fail(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.warmup >= args.steps and args.steps > 1:
        fail(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
    lengths = " ".join(map(str, args.buckets or ()))
    if args.buckets and min(args.buckets) < 4:
        fail(f"--buckets {lengths}: lengths from 4 on are expected")
    if args.buckets and args.packed:
        fail(f"--buckets {lengths}: rows of one document each are not --packed")
    if args.buckets:
        args.buckets, args.seq_length = sorted(set(args.buckets)), max(args.buckets)
    if args.accumulate and args.batch_size % args.accumulate:
        fail(f"--accumulate {args.accumulate} does not divide --batch-size {args.batch_size}")
    if args.image_size % 4 or args.image_size < 16:
        fail(f"--image-size {args.image_size}: a multiple of 4 from 16 on is expected")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def fail(message: str) -> NoReturn:
    """End the run; rank 0 says why."""
    raise SystemExit(f"error: {message}" if int(os.environ.get("RANK", 0)) == 0 else 1)
