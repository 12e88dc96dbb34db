"""MindSpeed's tools in Megatron's training loop: profiles, FLOP beside its log, dumps of tensors."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any, Iterator

from mindspeed_fx.megatron import expert_placement, patches
from mindspeed_fx.megatron.flags.tools import dump_settings
from mindspeed_fx.megatron.run_arguments import loop_arguments
from mindspeed_fx.megatron.training import compile_chunks, throughput
from mindspeed_fx.training.profile import Profile
from mindspeed_fx.training.tensor_dump import dump_tensors

MODULE = "megatron.training.training"
TRAIN, STEP = f"{MODULE}:train", f"{MODULE}:train_step"
_profiles: list[Profile] = []
_meters: list[throughput.Meter] = []
"""Of the loop that runs."""


def train(*args: Any, **kwargs: Any) -> Any:
    """``megatron.training.training.train`` with the tools that the arguments ask for."""
    chunks = kwargs["model"] if "model" in kwargs else args[1]
    with profiling(loop_arguments()), metering(loop_arguments()), dumping(loop_arguments(), chunks):
        return patches.original(TRAIN)(*args, **kwargs)


def train_step(*args: Any, **kwargs: Any) -> Any:
    """``train_step``; iterations that Megatron skips count too."""
    for profile in _profiles:
        while profile.iteration <= loop_arguments().curr_iteration:
            profile.step()
    with contextlib.ExitStack() as open_counts:
        for meter in _meters:
            open_counts.enter_context(meter.count)
        result = patches.original(STEP)(*args, **kwargs)
    expert_placement.after_train_step(loop_arguments(), args[2], args[3])
    for meter in _meters:
        meter.after(loop_arguments().curr_iteration + 1)
    return result


@contextlib.contextmanager
def dumping(args: Namespace, chunks: list[Any]) -> Iterator[None]:
    """Files of tensors that ``--npu-datadump`` asks for; each chunk's names begin with "chunkN."."""
    with contextlib.ExitStack() as stack:
        if getattr(args, "npu_datadump", False):
            folder, modules = dump_settings()
            is_compiled = compile_chunks.wants_compile() and not modules
            for n, chunk in enumerate(chunks):
                inner = compile_chunks.unwrap(chunk)
                stack.enter_context(dump_tensors(inner, folder, modules, compiled=is_compiled, prefix=f"chunk{n}."))
        yield


@contextlib.contextmanager
def metering(args: Namespace) -> Iterator[None]:
    """The counter that ``--op-cal-tflops`` asks for."""
    if not getattr(args, "op_cal_tflops", False):
        yield
        return
    _meters.append(throughput.Meter(args, eager=not compile_chunks.wants_compile()))
    try:
        yield
    finally:
        _meters.clear()


@contextlib.contextmanager
def profiling(args: Namespace) -> Iterator[None]:
    """The profile that MindSpeed's flags ask for, on the ranks that they name."""
    if not getattr(args, "mindspeed_profile", False):
        yield
        return
    profile = Profile(**profile_settings(args))
    if profile.start >= profile.end and args.rank == 0:
        print(
            f"mindspeed_fx: --profile: iterations before {profile.end} are done already; none is recorded", flush=True
        )
    with profile:
        _profiles.append(profile)
        try:
            yield
        finally:
            _profiles.remove(profile)
    if profile.iteration < profile.start < profile.end and args.rank == 0:
        text = f"the run ended at iteration {profile.iteration}, before --profile-step-start {profile.start}"
        print(f"mindspeed_fx: --profile: {text}; none was recorded", flush=True)


def profile_settings(args: Namespace) -> dict[str, Any]:
    """Arguments of :class:`Profile`; iterations are numbered as Megatron logs them."""
    return {
        "path": args.profile_save_path,
        "start": args.profile_step_start,
        "end": args.profile_step_end,
        "first": args.iteration + 1,
        "ranks": args.profile_ranks,
        "level": args.profile_level,
        "with_cpu": args.profile_with_cpu,
        "with_stack": args.profile_with_stack,
        "with_memory": args.profile_with_memory,
        "record_shapes": args.profile_record_shapes,
        "simplify": args.profile_data_simplification,
        "export": args.profile_export_type,
    }
