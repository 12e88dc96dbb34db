"""``--swap-layer-input`` and ``--smart-swap`` in Megatron-LM's training: the losses of the eager run, and as many bytes
on their way to the host as the closed form says."""

from __future__ import annotations

import json
import os

import pytest

from tests.megatron.launch import runner
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

HERE = "tests.megatron.launch.test_swaps"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYER = 32 * 2 * 64 * 4
"""Bytes of a layer's input: a micro-batch of 2 sequences of 32 tokens, hidden size 64, float32."""
DEVICE = 3 * 2**20
PASSES = 3 * 4
"""Forwards of a chunk on one rank of data: 3 iterations of 4 micro-batches."""


def count_moves(rank: int) -> None:
    """Prints the bytes of every copy to the host."""
    from mindspeed_fx.kernels import copies

    start = copies._start

    def counted(out, x, device, way):
        if way == "out":
            print(f"event: moved {x.nbytes}", flush=True)
        return start(out, x, device, way)

    copies._start = counted


def small_device(rank: int) -> None:
    """As :func:`count_moves`, on a device of BYTES beside what ``--smart-swap`` leaves alone; prints budget and plan."""
    from mindspeed_fx.megatron import smart_swap
    from mindspeed_fx.passes.recompute import budget

    count_moves(rank)
    graph_bytes, places = smart_swap.graph_bytes, budget.places
    smart_swap.device_bytes = lambda: smart_swap.RESERVED + int(os.environ["BYTES"])

    def printed(*args):
        result = graph_bytes(*args)
        print(f"event: budget {result}", flush=True)
        return result

    def planned(step, plan):
        moves = sum(step.schedule.saved_bytes[v] for v, _, _ in plan.moves)
        print(f"event: plan {plan.bytes + step.inputs} {moves} {len(plan.moves)} {len(plan.recompute)}", flush=True)
        return places(step, plan)

    smart_swap.graph_bytes, budget.places = printed, planned


def events(run: runner.Run, name: str, rank: int = 0) -> list[list[int]]:
    lines = [line.split() for line in run.output[rank].splitlines() if line.startswith(f"event: {name} ")]
    return [[int(word) for word in line[2:]] for line in lines]


def moved(run: runner.Run, rank: int = 0) -> list[int]:
    return [int(line.split()[-1]) for line in run.output[rank].splitlines() if line.startswith("event: moved ")]


def check(flags: str, swap: str, world: int, options: dict | None = None) -> runner.Run:
    """Trains eagerly without ``swap``, and compiled with it: the same numbers."""
    plain = train(flags, world, EAGER)
    environ = {"MINDSPEED_FX_OPTIONS": json.dumps({"codegen": "eager", **(options or {})})}
    lean = train(f"{flags} {swap}", world, environ, setup=f"{HERE}:count_moves")
    assert all(n >= 1 for n in lean.graphs) and not lean.breaks
    assert set(lean.losses) == set(plain.losses) == {1, 2, 3}
    for iteration, losses in plain.losses.items():
        assert lean.losses[iteration] == pytest.approx(losses, rel=1e-5)
        assert lean.grad_norms[iteration] == pytest.approx(plain.grad_norms[iteration], rel=1e-5)
    return lean


@pytest.mark.parametrize("recompute", [WHOLE, pytest.param("", marks=pytest.mark.slow)])
def test_inputs_of_layers_but_of_the_last(recompute):
    lean = check(f"--num-layers 3 {recompute}", "--swap-layer-input", 1)
    assert moved(lean) == [LAYER] * (2 * PASSES)


def test_what_a_small_device_has_no_room_for():
    plain = train("", 1, EAGER)
    environ = {**COMPILED, "BYTES": str(DEVICE)}
    lean = train("--smart-swap", 1, environ, setup=f"{HERE}:small_device")
    print(events(lean, "budget"), events(lean, "plan"), sum(moved(lean)))
    assert 0
