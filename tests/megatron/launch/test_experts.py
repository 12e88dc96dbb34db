"""Megatron-LM's training with MindSpeed's experts and with Muon: losses and gradient norms of the runs they stand for,
eager and compiled, over gloo."""

from __future__ import annotations

import shutil

import pytest

from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train

MOE = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
DEEPSPEED = """--moe-model-type deepspeed_moe --num-experts 4 --expert-model-parallel-size 2 --ffn-hidden-size 96
    --moe-train-capacity-factor 1.0"""
BUCKETS = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 20000"
LIMITED = """--moe-router-load-balancing-type group_limited_greedy --moe-router-num-groups 2 --moe-router-group-topk 1
    --moe-router-topk-scaling-factor 2.0 --moe-aux-loss-coeff 0.01 --moe-device-level-aux-loss-coeff 0.01 --seq-aux"""
MUON = "--muon-fp32-matmul-prec high"
PAIRS = {
    "slices of experts": (f"{DEEPSPEED} {BUCKETS}", "--use-pipe-experts --pipe-experts-multi-data 2"),
    "hot experts": (MOE, "--balanced-moe-experts --balanced-moe-hot-expert-num 1"),
    "Muon by layers": (f"--optimizer muon {MUON}", "--optimizer dist_muon"),
    "groups of experts": (f"{MOE} {LIMITED}", ""),
    "parts of the sequence": (f"{DEEPSPEED} --ampipe-degree 2", ""),
}
"""Flags of a run, and those that change who computes and when, not what."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_the_same_losses(name):
    flags, more = PAIRS[name]
    plain = train(flags, 2, EAGER)
    for environ, graphs in ((EAGER, 0), (COMPILED, 1)):
        run = train(f"{flags} {more}", 2, environ)
        assert run.graphs == [graphs] * 2, run.breaks
        for iteration, losses in plain.losses.items():
            assert run.losses[iteration] == pytest.approx(losses, rel=1e-5)
            assert run.grad_norms[iteration] == pytest.approx(plain.grad_norms[iteration], rel=1e-5)


MOVES = "--enable-expert-placement --expert-placement-freq 1 --print-expert-load"


def move_always(rank: int) -> None:
    """Every placement moves every expert, whatever the loads are."""
    import itertools

    from mindspeed_fx.megatron import expert_placement

    falling = itertools.count(0, -1)
    expert_placement.choose = lambda tokens, ranks, before: [*before[1:], before[0]]
    expert_placement.variation = lambda values: next(falling)
    move = expert_placement.move

    def tell(layer, optimizer, after):
        print(f"moved: {layer.expert_of_slot.tolist()} {after}", flush=True)
        move(layer, optimizer, after)

    expert_placement.move = tell


ALWAYS = "tests.megatron.launch.test_experts:move_always"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, world",
    [
        ("", 2),
        ("--bf16 --use-distributed-optimizer", 2),
        ("--bf16", 2),
        ("", 4),
        ("--bf16 --use-distributed-optimizer", 4),
        ("--use-distributed-optimizer", 4),
    ],
)
def test_experts_that_move(flags, world):
    """On four ranks two have the same experts, and parts of their states with the distributed optimizer."""
    words = f"{MOE} {flags}"
    plain = train(words, world, EAGER)
    tolerance = 1e-3 if "--bf16" in flags else 1e-5
    for environ, graphs in ((EAGER, 0), (COMPILED, 1)):
        run = train(f"{words} {MOVES}", world, environ, setup=ALWAYS)
        lines = run.output[0].splitlines()
        assert run.graphs == [graphs] * world and sum(line.startswith("moved: ") for line in lines) == 3 * 2
        assert any("layer 1 of experts: tokens of ranks" in line for line in lines)
        for iteration, losses in plain.losses.items():
            assert run.losses[iteration] == pytest.approx(losses, rel=tolerance)
            assert run.grad_norms[iteration] == pytest.approx(plain.grad_norms[iteration], rel=tolerance)


@pytest.mark.slow
def test_experts_that_move_are_saved_where_they_were(tmp_path):
    """Two steps after a checkpoint of a run whose experts move are those of a run whose experts stay."""
    words = f"{MOE} --use-distributed-optimizer --lr-decay-iters 4 --train-iters 4"
    stays = train(words, 2, EAGER)
    train(f"{words} {MOVES} --save {tmp_path} --save-interval 2", 2, EAGER, setup=ALWAYS)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(tmp_path / "iter_0000004")
    rest = train(f"{words} --load {tmp_path}", 2, EAGER)
    for k in (3, 4):
        assert rest.losses[k] == pytest.approx(stays.losses[k], rel=1e-5)
        assert rest.grad_norms[k] == pytest.approx(stays.grad_norms[k], rel=1e-5)
