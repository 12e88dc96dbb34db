"""``--swap-layer-input`` and ``--smart-swap`` in Megatron-LM's training: the losses of the eager run, and as many bytes
on their way to the host as the closed form says."""

from __future__ import annotations

import json
import os

import pytest

from tests.megatron.launch import runner
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, SMALL, train

HERE = "tests.megatron.launch.test_swaps"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYER = 32 * 2 * 64 * 4
"""Bytes of a layer's input: a micro-batch of 2 sequences of 32 tokens, hidden size 64, float32."""
PASSES = 3 * 4
"""Forwards of a chunk on one rank of data: 3 iterations of 4 micro-batches."""
WIDE = "--hidden-size 128 --seq-length 64 --max-position-embeddings 64 --ffn-hidden-size 256"
WEIGHTS = 4 * (2 * 128 * 128 + 2 * (128 * (3 * 128 + 128 + 2 * 256 + 256) + 2 * 128) + 128)
"""Bytes of the wide model's: two tables of 128 words, two layers, a norm."""
DEVICE = 9 * 2**20


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
    """As :func:`count_moves`, on a device of BYTES beside what ``--smart-swap`` leaves alone; prints budget, plan."""
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


def check(flags: str, swap: str, world: int, environ: dict[str, str] = COMPILED, setup: str = "count_moves"):
    """Trains eagerly without ``swap``, and compiled with it: the same numbers; returns the second run."""
    plain = train(flags, world, EAGER)
    lean = train(f"{flags} {swap}", world, environ, setup=f"{HERE}:{setup}")
    assert all(n >= 1 for n in lean.graphs) and not lean.breaks
    assert set(lean.losses) == set(plain.losses) == {1, 2, 3}
    for iteration, losses in plain.losses.items():
        assert lean.losses[iteration] == pytest.approx(losses, rel=1e-5)
        assert lean.grad_norms[iteration] == pytest.approx(plain.grad_norms[iteration], rel=1e-5)
    return lean


def test_inputs_of_layers_but_of_the_last():
    lean = check(f"--num-layers 3 {WHOLE}", "--swap-layer-input", 1)
    assert moved(lean) == [LAYER] * (2 * PASSES)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--recompute-norm", "--recompute-activation-function"])
def test_inputs_of_layers_that_are_not_recomputed(words):
    lean = check("--num-layers 3", f"--swap-layer-input {words}", 1)
    assert moved(lean) == [LAYER] * (2 * PASSES)


@pytest.mark.slow
@pytest.mark.parametrize("layers, counts", [("", (3, 2)), ("--num-layers-per-virtual-pipeline-stage 2", (2, 1))])
def test_inputs_of_layers_of_pipeline_stages(layers, counts):
    """Of 8 layers on two ranks all but the last of a rank, and but the first of a chunk that receives its input."""
    flags = f"--num-layers 8 --pipeline-model-parallel-size 2 {WHOLE} {layers}"
    lean = check(flags, "--swap-layer-input", 2)
    for rank, own in enumerate(counts):
        assert moved(lean, rank) == [LAYER] * (own * PASSES)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--smart-swap --swap-optimizer", "--smart-swap --swap-attention --swap-layer-input"])
def test_with_generated_code_beside_other_swaps(words):
    lean = check(WIDE, words, 1, {"BYTES": str(DEVICE)}, "small_device")
    assert moved(lean) if "attention" in words else events(lean, "plan")


def test_what_a_small_device_has_no_room_for():
    """The budget is what the device has less moments and weights, of which the graph is handed both and their
    main_grad; what the plan moves is moved in each forward.
    """
    lean = check(WIDE, "--smart-swap", 1, {**COMPILED, "BYTES": str(DEVICE)}, "small_device")
    (((budget,),), ((peak, nbytes, count, _),)) = events(lean, "budget"), events(lean, "plan")
    assert budget == DEVICE - 2 * WEIGHTS and budget * 0.9 < peak <= budget
    assert len(moved(lean)) == count * PASSES > 0 and sum(moved(lean)) == nbytes * PASSES


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, moves", [("--adaptive-memory-optimization", True), ("--adaptive-recompute-device-swap", False)]
)
def test_what_is_planned_without_profiling(words, moves):
    lean = check(WIDE, words, 1, {**COMPILED, "BYTES": str(DEVICE)}, "small_device")
    (((budget,),), ((peak, _, count, again),)) = events(lean, "budget"), events(lean, "plan")
    assert budget == DEVICE - 2 * WEIGHTS and peak <= budget
    assert bool(count) == moves == bool(moved(lean)) and again


@pytest.mark.slow
def test_a_budget_of_the_user_s_own():
    """In place of the device's; none moves where all fits."""
    for given, moves in (("6250KiB", True), ("1GiB", False)):
        options = {"codegen": "eager", "memory_budget": given}
        lean = check(WIDE, "--smart-swap", 1, {"MINDSPEED_FX_OPTIONS": json.dumps(options)})
        assert bool(moved(lean)) == moves


@pytest.mark.slow
def test_a_device_without_room_for_the_states_is_named():
    words = [*SMALL, *WIDE.split(), "--smart-swap"]
    result = runner.run(words, 1, environ={"BYTES": str(2**20)}, setup=f"{HERE}:small_device")
    assert "--smart-swap: the device has 2.00 GiB" in result.error and "nothing is left" in result.error
