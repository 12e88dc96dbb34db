"""Profiles, determinism, counting, searching, recovery."""

from __future__ import annotations

import os
from argparse import Namespace

from mindspeed_fx.megatron.flags.flag import (
    MEGATRON,
    OPTION,
    REFUSED,
    Flag,
    NotDone,
    get,
    setting,
    switch,
    word,
)

PROFILE = "remove it; Megatron's --profile --use-pytorch-profiler profiles with its own settings"
SEARCH = "remove it; `mindspeed-fx plan` searches plans by its cost model"
RECOVERY = "remove it; Megatron's --save and --save-interval keep checkpoints"


def _profile_all(args: Namespace) -> str:
    """-1 means every rank; Megatron's list names them."""
    args.profile_ranks = list(range(get(args, "world_size") or int(os.getenv("WORLD_SIZE", "1"))))
    return f"profile_ranks = {args.profile_ranks[0]} to {args.profile_ranks[-1]}"


def _be_deterministic(args: Namespace) -> None:
    """The environment of HCCL and CANN, and torch's own switch."""
    import torch

    os.environ["HCCL_DETERMINISTIC"] = "True"
    os.environ["CLOSE_MATMUL_K_SHIFT"] = "1"
    os.environ["PYTHONHASHSEED"] = str(get(args, "seed", 1234))
    torch.use_deterministic_algorithms(True)


def _count(args: Namespace) -> str:
    args.log_throughput = True
    return "log_throughput = True"


def _framework(args: Namespace) -> str:
    if args.ai_framework != "pytorch":
        raise NotDone("PyTorch alone; remove the flag")
    return "PyTorch"


def _machine(name: str, kind: type, default: object) -> Flag:
    return setting(name, "--auto-settings", default, kind)


FLAGS = [
    switch(
        "--npu-deterministic",
        OPTION,
        "the same numbers in every run",
        "torch.use_deterministic_algorithms, HCCL_DETERMINISTIC and CLOSE_MATMUL_K_SHIFT",
        act=lambda args: "torch.use_deterministic_algorithms(True), HCCL_DETERMINISTIC, CLOSE_MATMUL_K_SHIFT",
        start=_be_deterministic,
    ),
    switch(
        "--op-cal-tflops",
        MEGATRON,
        "counts the operations of every operator, and prints the throughput",
        "`--log-throughput`, by Megatron's formula; `mindspeed-fx explain` counts every operator",
        act=_count,
    ),
    word(
        "--ai-framework",
        "pytorch",
        OPTION,
        "pytorch or mindspore",
        "pytorch; an error for another",
        act=_framework,
    ),
    Flag(
        "--profile-ranks",
        MEGATRON,
        "ranks to profile; -1 is all",
        "Megatron's own flag; -1 becomes the list of all ranks",
        type=int,
        nargs="+",
        default=[0],
        requested=lambda args: get(args, "profile_ranks") == -1,
        act=_profile_all,
    ),
    word(
        "--profile-level",
        "level0",
        REFUSED,
        "how much torch_npu's profiler records",
        PROFILE,
        choices=("level_none", "level0", "level1", "level2"),
        skip=True,
    ),
    *(
        switch(f"--profile-{name}", REFUSED, "what torch_npu's profiler records", PROFILE, skip=True)
        for name in ("record-shapes", "with-cpu", "with-memory", "with-stack", "data-simplification")
    ),
    word("--profile-save-path", "./profile_dir", REFUSED, "where profiles go", PROFILE, skip=True),
    word(
        "--profile-export-type",
        "text",
        REFUSED,
        "in which form profiles are written",
        PROFILE,
        choices=("text", "db"),
        skip=True,
        llm=True,
    ),
    switch(
        "--npu-datadump",
        REFUSED,
        "values of operators are written to files",
        'remove it; option `dump` writes graphs, option `check`: "each" compares values',
        skip=True,
    ),
    switch(
        "--jit-compile",
        REFUSED,
        "CANN compiles operators while running",
        "remove it; torch_npu.npu.set_compile_mode(jit_compile=True) in the script sets it",
        skip=True,
    ),
    switch("--auto-settings", REFUSED, "searches parallel sizes by profiling", SEARCH),
    _machine("--auto-settings-log-level", str, "info"),
    _machine("--auto-settings-ranks", int, 8),
    _machine("--auto-settings-type", str, "mixed"),
    _machine("--auto-settings-work-dir", str, os.curdir),
    _machine("--master-addr", str, "127.0.0.1"),
    _machine("--master-port", int, 29500),
    _machine("--nnodes", int, 1),
    _machine("--node-rank", int, 0),
    _machine("--nproc-per-node", int, 1),
    _machine("--prof-file", str, None),
    _machine("--target-nnodes", int, 1),
    word(
        "--additional-config",
        None,
        REFUSED,
        "a file of settings for parts of a multimodal model",
        "give the settings as flags",
    ),
    switch("--ttp-enabled", REFUSED, "a dying rank's states are written by the others", RECOVERY, skip=True),
    setting("--ttp-dump-dir", "--ttp-enabled", "ttp_dump"),
    setting("--ttp-dump-timeout-seconds", "--ttp-enabled", 60),
    setting("--ttp-heartbeat-interval-ms", "--ttp-enabled", 1000),
    setting("--ttp-heartbeat-timeout-ms", "--ttp-enabled", 3000),
    setting("--ttp-max-dump-ckpt-to-keep", "--ttp-enabled", 1),
    setting("--ttp-max-missed-count", "--ttp-enabled", 3),
    *(
        Flag(
            name,
            REFUSED,
            "a setting of `--ttp-enabled`",
            "what becomes of `--ttp-enabled`; without that flag it has no effect",
            action="store_true",
            default=True,
            of="--ttp-enabled",
        )
        for name in ("--ttp-save-optimizer", "--ttp-save-rng")
    ),
    setting("--ttp-server-ip", "--ttp-enabled", "0.0.0.0"),
    setting("--ttp-server-port", "--ttp-enabled", 29500),
    setting("--ttp-wait-dump-file-timeout", "--ttp-enabled", 60),
    switch("--enable-high-availability", REFUSED, "MindIO repairs ranks", RECOVERY, skip=True, llm=True),
    *(
        setting(name, "--enable-high-availability", llm=True)
        for name in (
            "--enable-elastic-training",
            "--enable-hbmfault-repair",
            "--enable-worker-reboot",
            "--distributed-optimizer-no-replica",
        )
    ),
]
"""Rows of the table."""
