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
from mindspeed_fx.training.profile import EXPORTS, LEVELS, check_steps, find_device

SEARCH = "remove it; `mindspeed-fx plan` searches plans by its cost model"
RECOVERY = "remove it; Megatron's --save and --save-interval keep checkpoints"


def _is_profiled(args: Namespace) -> bool:
    return bool(get(args, "profile") or get(args, "mindspeed_profile"))


def _profile(args: Namespace) -> str:
    """Megatron's loop profiles by itself where it is asked to; else its flag is taken over."""
    settings = [flag for flag in PROFILE_FLAGS if flag.differs(args)]
    names = ", ".join(flag.name for flag in settings)
    if get(args, "use_pytorch_profiler"):
        if settings:
            raise NotDone(
                f"--use-pytorch-profiler is Megatron's own profile, which does not read {names}; remove one of them"
            )
        return "Megatron's own profile, by --use-pytorch-profiler"
    device = find_device()
    if device == "cuda" and not settings:
        return (
            "Megatron's ranges for nsys; a --profile-* flag of MindSpeed's, such as --profile-with-cpu, writes traces"
        )
    if get(args, "profile_export_type", "text") != "text" and device != "npu":
        raise NotDone(f"--profile-export-type {args.profile_export_type} is torch_npu's; on {device} give text")
    start, end = get(args, "profile_step_start", 10), get(args, "profile_step_end", 12)
    try:
        check_steps(start, end)
    except ValueError as error:
        raise NotDone(f"--profile-step-start and --profile-step-end: {error}") from None
    _check_ranks(args)
    args.profile, args.mindspeed_profile = False, True
    profiler = "torch_npu.profiler" if device == "npu" else "torch.profiler"
    text = f"{profiler}: iterations {start} to {end - 1}, a trace for each rank in {args.profile_save_path}"
    return text + _unread(settings, device, get(args, "profile_with_cpu", False))


def _unread(settings: list[Flag], device: str, with_cpu: bool) -> str:
    """What is given and has no effect on this device."""
    npu = ", ".join(f.name for f in settings if f.name in NPU_PROFILE)
    host = ", ".join(f.name for f in settings if f.name in HOST_PROFILE)
    text = ""
    if npu and device != "npu":
        text += f"; torch_npu's alone: {npu}"
    if host and device != "cpu" and not with_cpu:
        text += f"; without --profile-with-cpu no effect: {host}"
    return text


NPU_PROFILE = ("--profile-level", "--profile-data-simplification", "--profile-export-type")
HOST_PROFILE = ("--profile-with-stack", "--profile-with-memory", "--profile-record-shapes")


def _world_size(args: Namespace) -> int:
    return get(args, "world_size") or int(os.getenv("WORLD_SIZE", "1"))


def _check_ranks(args: Namespace) -> None:
    ranks = getattr(args, "profile_ranks", [0])
    absent = [rank for rank in ranks if rank != ALL_RANKS and not 0 <= rank < _world_size(args)]
    if absent:
        raise NotDone(f"--profile-ranks {absent[0]}: the ranks of this run are 0 to {_world_size(args) - 1}")


ALL_RANKS = -1


def _profile_all(args: Namespace) -> str:
    """-1 means every rank; Megatron's list names them."""
    args.profile_ranks = list(range(_world_size(args)))
    return f"profile_ranks = {args.profile_ranks[0]} to {args.profile_ranks[-1]}"


DETERMINISTIC = {
    "HCCL_DETERMINISTIC": "True",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
}


def _be_deterministic(args: Namespace) -> None:
    """The environment of HCCL, LCCL and CANN, for cuda that of cuBLAS, and torch's own switch."""
    import torch

    os.environ.update(DETERMINISTIC)
    if find_device() == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses a product
    os.environ["PYTHONHASHSEED"] = str(get(args, "seed", 1234))
    torch.use_deterministic_algorithms(True)


DUMP_VARIABLE, MODULES_VARIABLE = "MINDSPEED_FX_DUMP_TENSORS", "MINDSPEED_FX_DUMP_MODULES"


def dump_settings() -> tuple[str, str]:
    """Folder and globs of ``--npu-datadump``."""
    return os.environ.get(DUMP_VARIABLE, "./npu_datadump"), os.environ.get(MODULES_VARIABLE, "*")


def _dump(args: Namespace) -> str:
    folder, modules = dump_settings()
    if modules:
        return f"outputs and gradients of modules {modules!r} in {folder}; chunks run eager, as hooks break graphs"
    return f"outputs and gradients of each chunk in {folder}"


def _run_eager_to_dump(args: Namespace) -> None:
    """Chunks are not compiled where modules inside them are seen."""
    if dump_settings()[1]:
        os.environ["MINDSPEED_FX_COMPILE"] = "0"


PEAK_FLAG = "--mindspeed-peak-tflops"
"""Ours: of one device, for MFU."""


def _count(args: Namespace) -> str:
    peak = get(args, "mindspeed_peak_tflops")
    if peak is not None and peak <= 0:
        raise NotDone(f"{PEAK_FLAG} {peak} is no rate; give the TFLOP/s of one device")
    args.log_throughput = True
    return "graphs count their FLOP, a line beside each of Megatron's; log_throughput = True, by Megatron's formula"


def _framework(args: Namespace) -> str:
    if args.ai_framework != "pytorch":
        raise NotDone("PyTorch alone; remove the flag")
    return "PyTorch"


def _machine(name: str, kind: type, default: object) -> Flag:
    return setting(name, "--auto-settings", default, kind)


PROFILE_FLAGS = [
    Flag(
        "--profile-level",
        OPTION,
        "how much torch_npu's profiler records",
        "torch_npu's profiler_level",
        type=str,
        default="level0",
        choices=LEVELS,
        of="--profile",
    ),
    *(
        Flag(f"--profile-{name}", OPTION, asks, "done", action="store_true", default=False, of="--profile")
        for name, asks in (
            ("record-shapes", "shapes of inputs"),
            ("with-cpu", "calls on the host"),
            ("with-memory", "allocations"),
            ("with-stack", "where in the source"),
            ("data-simplification", "raw data are removed"),
        )
    ),
    Flag("--profile-save-path", OPTION, "folder", "done", type=str, default="./profile_dir", of="--profile"),
    Flag(
        "--profile-export-type",
        OPTION,
        "text or db",
        "done",
        type=str,
        default="text",
        choices=EXPORTS,
        of="--profile",
        llm=True,
    ),
]
"""Settings of ``--profile``."""

_ENVIRONMENT = ", ".join(DETERMINISTIC)

FLAGS = [
    switch(
        "--npu-deterministic",
        OPTION,
        "the same numbers in every run",
        f"torch.use_deterministic_algorithms(True), {_ENVIRONMENT}; passes whose products with collectives promise no "
        "order are off, and reports name them ([tools.md](tools.md))",
        act=lambda args: f"torch.use_deterministic_algorithms(True), {_ENVIRONMENT}",
        start=_be_deterministic,
    ),
    switch(
        "--op-cal-tflops",
        OPTION,
        "counts the operations of every operator, and prints the throughput",
        "a line beside each of Megatron's: FLOP of the model and of the hardware, counted by the graphs that run "
        f"(option `count_flops`), per second, and MFU and HFU of the device's peak or of `{PEAK_FLAG}`; and "
        "`--log-throughput` ([tools.md](tools.md))",
        act=_count,
        options=lambda args: {"count_flops": True},
    ),
    word(
        "--ai-framework",
        "pytorch",
        OPTION,
        "pytorch or mindspore",
        "pytorch; an error for another",
        act=_framework,
    ),
    switch(
        "--profile",
        OPTION,
        "torch_npu's profiler around chosen iterations",
        "torch_npu.profiler on npu, torch.profiler on cpu and cuda, around iterations `--profile-step-start` to the "
        "one before `--profile-step-end` of the ranks in `--profile-ranks` (rank 0 where none is given); Megatron's "
        "own with `--use-pytorch-profiler`, and on cuda without any of the flags below ([tools.md](tools.md))",
        requested=_is_profiled,
        act=_profile,
        skip=True,
    ),
    Flag(
        "--profile-ranks",
        MEGATRON,
        "ranks to profile; -1 is all",
        "Megatron's own flag; -1 becomes the list of all ranks",
        type=int,
        nargs="+",
        default=[0],
        requested=lambda args: ALL_RANKS in (getattr(args, "profile_ranks", None) or []),
        act=_profile_all,
    ),
    *PROFILE_FLAGS,
    switch(
        "--npu-datadump",
        OPTION,
        "values of operators are written to files",
        f"outputs of modules and their gradients, in `{DUMP_VARIABLE}` (./npu_datadump), of the modules that the globs "
        f'in `{MODULES_VARIABLE}` name ("*"), whose chunks then run eager; "" is the compiled chunk itself; '
        "`mindspeed-fx compare-dumps A B` compares two runs ([tools.md](tools.md))",
        act=_dump,
        start=_run_eager_to_dump,
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
