"""Idle time of pipeline schedules over gloo processes beside the modelled bubble: layers that sleep a known time.

    python -m benchmarks.pipeline_idle [--ranks 4] [--microbatches 8] [--seconds 0.2] [--steps 2] [--schedules A,B]
                                       [--realtime 1]

Each layer sleeps ``seconds`` in its forward, as long for the gradient of its input, and as long for that of its weight
(torch.library operators, so that the backward in parts puts each where it belongs). There are twice as many layers as
ranks: two in a stage where a rank has one stage, else one. Idle is the time that a rank is in no forward and no
backward of its stages, over a whole step; the bubble is the mean of the ranks' idle over the longest rank's step, also
where it is modelled (``cost/pipeline.py`` plays the schedule's order with the seconds that were asked for; messages
cost nothing). The first stage's gradient of its input is one of a weight before the layers, and made with them.
Sleeping needs no processor: four ranks on two cores measure what four machines would wait. On a machine that others use
too, ``--realtime 1`` (as root) has the ranks run before everybody else while they are measured, so that they wake when
they wanted to. Of several steps the fastest counts: what others do only adds.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import mindspeed_fx
from benchmarks import common
from mindspeed_fx.cost.pipeline import Parts, play_stages, torch_order

SCHEDULES = {
    "GPipe": (1, "loop"),
    "1F1B": (1, "loop"),
    "Interleaved1F1B": (2, "loop"),
    "LoopedBFS": (2, "loop"),
    "InterleavedZeroBubble": (2, "loop"),
    "ZBVZeroBubble": (2, "v"),
    "DualPipeV": (2, "v"),
}
"""Stages on a rank, and which."""

SECONDS = [0.0]
"""What a layer sleeps, once for each of its three operators; 0 where a step warms up."""


def _sleep() -> None:
    if SECONDS[0]:
        time.sleep(SECONDS[0])


@torch.library.custom_op("idle::forward", mutates_args=())
def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    _sleep()
    return x * weight


@torch.library.custom_op("idle::input_gradient", mutates_args=())
def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    _sleep()
    return gradient * weight


@torch.library.custom_op("idle::weight_gradient", mutates_args=())
def weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _sleep()
    return (gradient * x).sum(0)


forward.register_fake(lambda x, weight: torch.empty_like(x))
input_gradient.register_fake(lambda gradient, weight: torch.empty_like(gradient))
weight_gradient.register_fake(lambda gradient, x: torch.empty_like(x[0]))


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors
    return input_gradient(gradient, weight), weight_gradient(gradient, x)


forward.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Layer(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return forward(x, self.weight)


class Model(nn.Module):
    def __init__(self, layers: int, width: int = 8):
        super().__init__()
        self.entry = nn.Parameter(torch.rand(width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.entry
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Meter:
    """Seconds inside the forwards and backwards of stages."""

    def __init__(self, stages: list[Any]):
        self.busy = 0.0
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, self._timed(getattr(stage, name)))

    def _timed(self, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.busy += time.perf_counter() - start

        return run


def worker(rank: int, store: str, arg: Any, names: list[str], results: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining.schedules import get_schedule_class

    torch.set_num_threads(1)
    _run_first(arg.realtime)  # gloo's threads begin so
    dist.init_process_group("gloo", store=dist.FileStore(store, arg.ranks), rank=rank, world_size=arg.ranks)
    mesh = init_device_mesh("cpu", (arg.ranks,), mesh_dim_names=("pp",))
    x = torch.rand(arg.microbatches, 8)
    for name in names:
        virtual, style = SCHEDULES[name]
        _run_first(False)
        torch.manual_seed(0)
        stages = mindspeed_fx.pipeline_stages(
            Model(2 * arg.ranks),
            mesh,
            None,
            (x,),
            virtual=virtual,
            style=style,
            microbatches=arg.microbatches,
            options={"codegen": "eager"},
        )
        meter, kind = Meter(stages), get_schedule_class(name)
        schedule = kind(stages if virtual > 1 else stages[0], arg.microbatches, loss_fn=lambda loss, _: loss.sum())
        measured = []
        for step in range(arg.steps + 1):
            SECONDS[0] = arg.seconds if step else 0.0
            _run_first(arg.realtime and step)
            dist.barrier()
            meter.busy, start = 0.0, time.perf_counter()
            schedule.step(x=x, target=x)
            measured.append((time.perf_counter() - start, meter.busy))
        everyone: list[Any] = [None] * arg.ranks
        dist.all_gather_object(everyone, measured[1:])
        if not rank:
            results[name] = everyone
    dist.destroy_process_group()


def _run_first(first: Any) -> None:
    """Whether this thread, and those that it starts, run before those of other programs."""
    if hasattr(os, "sched_setscheduler"):
        policy = os.SCHED_FIFO if first else os.SCHED_OTHER
        os.sched_setscheduler(0, policy, os.sched_param(1 if first else 0))


def modelled(name: str, ranks: int, microbatches: int, seconds: float) -> tuple[float, float]:
    """Seconds of a step, and the bubble."""
    virtual = SCHEDULES[name][0]
    stages, work = ranks * virtual, seconds * 2 / virtual
    parts = [Parts(work, 0.0, work, work)] * stages
    parts[0] = Parts(work, 0.0, 0.0, 2 * work)
    played = play_stages(torch_order(name, ranks, stages, microbatches), parts)
    return played.seconds, played.bubble


def main() -> None:
    arg = common.arguments(ranks=4, microbatches=8, seconds=0.2, steps=2, realtime=0, schedules=",".join(SCHEDULES))
    common.header(
        f"{arg.ranks} gloo processes, {2 * arg.ranks} layers that sleep {arg.seconds} s for each of forward, gradient "
        f"of input and of weight; {arg.microbatches} microbatches, {arg.steps} steps after one without sleep"
    )
    names = arg.schedules.split(",")
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(worker, (f"{folder}/store", arg, names, results), nprocs=arg.ranks)
        print(f"{'schedule':<22} {'step s':>8} {'modelled':>9} | {'bubble %':>8} {'modelled':>9} {'ratio':>6}")
        for name in names:
            steps, idle = [], []
            for ranks in zip(*results[name]):
                steps.append(max(seconds for seconds, _ in ranks))
                idle.append(sum(steps[-1] - busy for _, busy in ranks) / arg.ranks / steps[-1])
            seconds, bubble = modelled(name, arg.ranks, arg.microbatches, arg.seconds)
            step, share = min(zip(steps, idle))
            print(
                f"{name:<22} {step:>8.2f} {seconds:>9.2f} | {share * 100:>8.2f} {bubble * 100:>9.2f} "
                f"{share / bubble:>6.3f}"
            )


if __name__ == "__main__":
    main()
