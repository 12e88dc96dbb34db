"""Models of Megatron-LM's pretrain_gpt.py: one graph per chunk, and the losses and gradient norms of Megatron eager."""

import os
import re
import sys

import pytest

from tests.megatron.launch import runner

SMALL = """
--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
--global-batch-size 4 --train-iters 2 --lr 1e-3 --min-lr 1e-4 --mock-data --tokenizer-type NullTokenizer
--vocab-size 63 --make-vocab-size-divisible-by 16 --transformer-impl local --eval-iters 1 --eval-interval 100
--log-interval 1 --attention-dropout 0 --hidden-dropout 0
""".split()
MODERN = """
--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights
""".split()
MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8"
LOGGED = re.compile(r"((?:mtp_\d+|\w*load_balancing|z)[ _]loss): ([0-9.E+-]+)")


def shorter(flags):
    """``flags`` with one layer, unless they say how many."""
    return flags if "--num-layers" in flags else f"--num-layers 1 {flags}"


def keep_what_is_printed(rank):
    """pytest has put something else in the place of ``sys.stdout``."""
    sys.stdout = os.fdopen(1, "w", closefd=False)


def train(flags, world, compiled):
    switch = {"MINDSPEED_FX_OPTIONS": '{"codegen": "eager"}'} if compiled else {"MINDSPEED_FX_COMPILE": "0"}
    result = runner.run(SMALL + shorter(flags).split(), world, environ=switch, setup=keep_what_is_printed)
    assert result.error is None, result.error
    return result


def logged(result):
    """What Megatron logs beside the loss, of each iteration: losses of experts and of tokens ahead."""
    return [(name, float(value)) for output in result.output for name, value in LOGGED.findall(output)]


def compare(flags, world=1, compiled_flags="", extra=0):
    """Train eager and compiled.

    Args:
        flags: of both.
        world: ranks.
        compiled_flags: of the compiled run alone.
        extra: losses that Megatron logs in an iteration, beside that of the model.
    """
    expected = train(flags, world, compiled=False)
    result = train(f"{flags} {compiled_flags}", world, compiled=True)
    assert sum(result.chunks) > 0
    assert result.graphs == [2 * chunks for chunks in result.chunks], result.breaks  # training and evaluation
    assert sorted(expected.losses) == sorted(expected.grad_norms) == [1, 2]
    for iteration, losses in expected.losses.items():
        assert result.losses[iteration] == pytest.approx(losses, rel=1e-5)
        assert result.grad_norms[iteration] == pytest.approx(expected.grad_norms[iteration], rel=1e-5)
    assert len(logged(expected)) == 2 * extra
    for (name, value), (expected_name, expected_value) in zip(logged(result), logged(expected), strict=True):
        assert name == expected_name and value == pytest.approx(expected_value, rel=1e-5) and value > 0


def modern(flags):
    return " ".join(MODERN) + " " + flags


def test_dropless_experts_on_two_ranks():
    flags = f"{MOE} --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap"
    compare(modern(f"{flags} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"), world=2, extra=1)


def test_latent_attention_with_multi_token_prediction():
    compare(modern(f"{LATENT} --q-lora-rank 24 --v-head-dim 12 --qk-layernorm --mtp-num-layers 1"), extra=1)


def test_virtual_stages_over_gloo():
    compare(
        modern("--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"), world=2
    )


TWO_RANKS = {
    "allgather": "--moe-token-dispatcher-type allgather --expert-model-parallel-size 2",
    "expert-tensor-parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "expert-tensor-parallel-allgather": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--moe-token-dispatcher-type allgather",
    "tensor-and-expert-parallel": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap",
    "shared-expert": "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16",
    "grouped-gemm": "--expert-model-parallel-size 2 --moe-grouped-gemm",
    "capacity": "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0",
    "padded": "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "sigmoid-bias-groups": "--num-layers 2 --moe-layer-freq [0,1] --expert-model-parallel-size 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2 "
    "--moe-router-group-topk 1 --moe-router-dtype fp32",
    "seq-aux": "--expert-model-parallel-size 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2",
    "global-aux": "--expert-model-parallel-size 2 --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 1e-2",
    "z-loss": "--expert-model-parallel-size 2 --moe-z-loss-coeff 1e-2",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO_RANKS)
def test_experts_on_two_ranks(case):
    compare(modern(f"{MOE} {TWO_RANKS[case]}"), world=2, extra=int(case.split("-")[-1] in ("aux", "loss")))
