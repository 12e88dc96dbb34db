"""torch_dist checkpoints of the distributed optimizer, with experts, loaded by runs of other parallel sizes."""

from __future__ import annotations

import shutil

import pytest

from tests.megatron.launch import runner
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, SMALL

EXPERTS = """--num-layers 4 --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type none --moe-ffn-hidden-size 32 --use-distributed-optimizer --ckpt-format torch_dist
    --no-gradient-accumulation-fusion --use-cpu-initialization --lr-decay-iters 4"""
TP, PP, EP = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--expert-model-parallel-size 2",
)
SIZES = {
    "one": ("", 1),
    "dp2": ("", 2),
    "tp2": (TP, 2),
    "pp2": (PP, 2),
    "vpp2": (f"{PP} --num-layers-per-virtual-pipeline-stage 1", 2),
    "ep2": (EP, 2),
    "tp2_ep2": (f"{TP} {EP} --expert-tensor-parallel-size 1", 2),
    "ep2_dp2": (EP, 4),
    "ep4": ("--expert-model-parallel-size 4", 4),
    "pp2_ep2": (f"{PP} {EP}", 4),
}
FULLY = "--dist-ckpt-optim-fully-reshardable --no-load-rng"
"""Of the optimizer's state by parameters; states of generators are by ranks."""


def run(sizes, flags, environ):
    more, world = SIZES[sizes]
    return runner.run([*SMALL, *EXPERTS.split(), *more.split(), *flags.split()], world, environ=environ)


def check_resharded(folder, saved, loaded, environ, iterations):
    """The second half of a run's losses is that of the runs which load its checkpoint."""
    whole = run(saved, f"{FULLY} --train-iters {iterations} --save {folder} --save-interval {iterations // 2}", environ)
    assert whole.error is None, whole.error
    shutil.rmtree(folder / f"iter_{iterations:07}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iterations // 2))
    for sizes in loaded:
        rest = run(sizes, f"{FULLY} --train-iters {iterations} --load {folder}", environ)
        assert rest.error is None, (sizes, rest.error)
        assert sorted(rest.losses) == list(range(iterations // 2 + 1, iterations + 1))
        for k, losses in rest.losses.items():
            assert losses == pytest.approx(whole.losses[k], rel=1e-6), sizes
            assert rest.grad_norms[k] == pytest.approx(whole.grad_norms[k], rel=1e-5), sizes


def test_experts_on_two_ranks_are_loaded_beside_tensor_parallelism(tmp_path):
    check_resharded(tmp_path, "ep2", ["tp2_ep2"], EAGER, iterations=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved, loaded",
    [
        ("one", ["dp2", "tp2", "pp2", "vpp2"]),
        ("tp2", ["one", "dp2", "pp2", "vpp2"]),
        ("pp2", ["one", "tp2"]),
        ("ep2", ["tp2_ep2", "ep2_dp2", "ep4", "pp2_ep2"]),
        ("pp2_ep2", ["ep2", "ep4", "tp2_ep2"]),
    ],
)
def test_other_parallel_sizes(tmp_path, saved, loaded):
    check_resharded(tmp_path, saved, loaded, COMPILED, iterations=4)


@pytest.mark.slow
@pytest.mark.parametrize("saved, loaded", [("ep2", "one"), ("one", "ep2")])
def test_weights_alone_where_experts_are_on_several_ranks_and_were_not(tmp_path, saved, loaded):
    """The optimizer's state of one is not the other's, in Megatron too; weights are."""
    whole = run(saved, f"{FULLY} --train-iters 2 --save {tmp_path} --save-interval 2", COMPILED)
    assert whole.error is None, whole.error
    load = f"{FULLY} --train-iters 4 --load {tmp_path}"
    assert run(loaded, load, COMPILED).error is not None
    own, other = (run(sizes, f"{load} --no-load-optim", COMPILED) for sizes in (saved, loaded))
    assert own.error is None and other.error is None, (own.error, other.error)
    assert other.losses[3] == pytest.approx(own.losses[3], rel=1e-5)
