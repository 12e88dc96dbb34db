"""Megatron-LM's training with MindSpeed's experts and with Muon: losses and gradient norms of the runs they stand for,
eager and compiled, over gloo."""

from __future__ import annotations

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
