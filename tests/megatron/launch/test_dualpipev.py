"""DualPipeV over Megatron's chunks: losses and gradient norms of the interleaved schedule, and torch's order."""

from __future__ import annotations

import re
import zlib

import pytest

from mindspeed_fx.compat import pipelining
from tests.megatron.launch import runner
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, SMALL, told

INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2"
V = "--schedules-method dualpipev"
PIPELINE = "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8"
EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2
    --moe-ffn-hidden-size 32 --use-distributed-optimizer --global-batch-size 16"""
SEEDED = "tests.megatron.launch.test_dualpipev:seed_by_name"


def seed_by_name(rank: int) -> None:
    """A weight's first values are drawn by its name in the whole model, wherever it lies; prints what a rank runs."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from mindspeed_fx.megatron.dualpipev import placement
    from mindspeed_fx.training import turns
    from mindspeed_fx.training.late_gradients import Queue

    get_model = training.get_model

    def seeded(*args, **kwargs):
        chunks = get_model(*args, **kwargs)
        for model in unwrap_model(chunks):
            numbers = {i: layer.layer_number for i, layer in enumerate(model.decoder.layers)}
            for name, weight in model.named_parameters():
                if getattr(weight, "shared", False):
                    name = "embedding.word_embeddings.weight"
                whole = re.sub(r"decoder\.layers\.(\d+)", lambda m: f"layer {numbers[int(m[1])]}", name)
                own = parallel_state.get_expert_model_parallel_rank() if "experts.local" in name else 0
                generator = torch.Generator().manual_seed(zlib.crc32(f"{whole} {own}".encode()))
                values = torch.randn(weight.shape, generator=generator) * 0.05 + ("norm" in name)
                weight.data.copy_(values)
        if hasattr(chunks[0], "dualpipev"):
            placement.tie(chunks)
        return chunks

    training.get_model = seeded

    schedules.forward_step = told("F", schedules.forward_step)
    schedules.backward_step = told("B", schedules.backward_step)
    Queue.run_one = told("W", Queue.run_one)
    turns._Pair.hand_over = told("turn", turns._Pair.hand_over)
    Buckets.start_grad_sync = told("reduce", Buckets.start_grad_sync)


def train(flags: str, world: int, environ: dict[str, str], tied: bool = False, setup: str = SEEDED) -> runner.Run:
    words = [w for w in SMALL if not (tied and w == "--untie-embeddings-and-output-weights")]
    result = runner.run([*words, *flags.split()], world, environ=environ, setup=setup)
    assert result.error is None, result.error
    return result


def seed_and_cut(rank: int) -> None:
    """As :func:`seed_by_name`; a micro-batch whose twelfth token is odd has 24 tokens a sample, others 32."""
    from megatron.training import utils

    seed_by_name(rank)
    get_batch = utils.get_batch_on_this_tp_rank

    def cut(*args, **kwargs):
        batch = get_batch(*args, **kwargs)
        tokens, labels = batch.get("tokens"), batch.get("labels")
        one = labels[0, 10] if tokens is None else tokens[0, 11]  # the same one on every stage
        length = 24 if int(one) % 2 else 32
        print(f"length: {length}", flush=True)
        ends = {"attention_mask": (..., slice(length), slice(length))}
        whole = {name: value for name, value in batch.items() if value is None or value.dim() < 2}
        rows = slice(None), slice(length)
        return whole | {n: v[ends.get(n, rows)].contiguous() for n, v in batch.items() if n not in whole}

    utils.get_batch_on_this_tp_rank = cut


def events(output: str) -> list[str]:
    return [x.removeprefix("event: ") for x in output.splitlines() if x.startswith("event: ")]


def check_equal(one, other, tolerance=1e-6):
    assert set(one.losses) == set(other.losses) == {1, 2, 3}
    for i, losses in one.losses.items():
        assert other.losses[i] == pytest.approx(losses, rel=tolerance)
        assert other.grad_norms[i] == pytest.approx(one.grad_norms[i], rel=tolerance)


def check_order(run, late: bool, turns: bool = False):
    """The schedule's order; of a forward and a backward that take turns the backward begins."""
    for rank, output in enumerate(run.output):
        pipeline = rank // (len(run.output) // 2)
        pairs = pipelining.orders_of("DualPipeV", 2, 4, 4)[pipeline]
        order = [call[0] for calls in pairs for call in (reversed(calls) if turns else calls)]
        kinds = "".join(order).replace("I", "B") if late else "".join(k for k in order if k != "W").replace("I", "B")
        found = "".join(e for e in events(output) if e not in ("turn", "reduce"))
        assert found[: 3 * len(kinds)] == kinds * 3 and set(found[3 * len(kinds) :]) <= {"F"}  # evaluation


def test_losses_of_the_interleaved_schedule():
    flags = f"{PIPELINE} --eval-iters 1 --eval-interval 3"
    plain, ours = train(f"{flags} {INTERLEAVED}", 2, EAGER), train(f"{flags} {V}", 2, EAGER)
    check_equal(plain, ours, 2e-7)  # the norm's sum over ranks has another order
    check_order(ours, late=False)
    told = [
        re.findall(r"validation loss at iteration 3 on validation set \| lm loss value: (\S+)", run.output[1])
        for run in (plain, ours)
    ]
    assert len(told[0]) == len(told[1]) == 1
    assert float(told[0][0]) == pytest.approx(float(told[1][0]), rel=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--dualpipev-dw-detach"])
def test_micro_batches_of_other_lengths(words):
    """``--variable-seq-lengths``: each message's shape goes before it."""
    flags = f"{PIPELINE} --variable-seq-lengths --no-gradient-accumulation-fusion"
    cut = f"{SEEDED.partition(':')[0]}:seed_and_cut"
    plain = train(flags, 2, EAGER, setup=cut)  # one stage a rank
    if not words:
        whole = train(flags.replace(PIPELINE, "--num-layers 4 --global-batch-size 8"), 1, EAGER, setup=cut)
        check_equal(whole, plain)
    ours = train(f"{flags} {V} {words}", 2, COMPILED if words else EAGER, setup=cut)
    assert {line for line in ours.output[0].splitlines() if line.startswith("length")} == {"length: 24", "length: 32"}
    check_equal(plain, ours, 2e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, world",
    [
        ("--swap-attention", 2),
        ("--context-parallel-size 2", 4),
        ("--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", 4),
    ],
)
def test_what_mindspeed_refuses_beside_it(words, world):
    """Attention that is moved to the host, and divided sequences (docs/mindspeed_conflicts.md)."""
    flags = f"{PIPELINE} --global-batch-size 16 {words}"
    plain = train(f"{flags} {INTERLEAVED}", world, EAGER)
    check_equal(plain, train(f"{flags} {V}", world, COMPILED))


@pytest.mark.slow
def test_late_gradients_of_weights():
    plain = train(f"{PIPELINE} {INTERLEAVED} --no-gradient-accumulation-fusion", 2, COMPILED)
    ours = train(f"{PIPELINE} {V} --dualpipev-dw-detach", 2, COMPILED)
    check_equal(plain, ours, 2e-7)  # the norm's sum over ranks has another order
    check_order(ours, late=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_gradients_are_reduced_during_the_last_backwards(way):
    """Bit for bit the run that reduces at the end; of each chunk a bucket is on its way before the last backward."""
    flags = f"{PIPELINE} {V} --use-distributed-optimizer --global-batch-size 16 --no-gradient-accumulation-fusion"
    plain, ours = (train(f"{flags} {more}", 4, way) for more in ("", "--overlap-grad-reduce"))
    assert ours.losses == plain.losses and ours.grad_norms == plain.grad_norms and len(ours.losses) == 3
    check_order(ours, late=False)
    for run, is_early in ((plain, False), (ours, True)):
        for output in run.output:
            told = events(output)
            ends = [i for i, event in enumerate(told) if event == "B"][2 * 4 - 1 :: 2 * 4]  # of four micro-batches
            assert ("reduce" in told[ends[1] + 3 : ends[2]]) == is_early, (
                told
            )  # Megatron's first step reduces at its end


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_both_copies_of_the_embedding(tied):
    """With tokens ahead, or tied to the output; data-parallel, with a part of each gradient on each rank."""
    model = "--calculate-per-token-loss" if tied else "--mtp-num-layers 1 --bf16 --accumulate-allreduce-grads-in-fp32"
    flags = f"{PIPELINE} {model} --use-distributed-optimizer --global-batch-size 16"
    plain = train(f"{flags} {INTERLEAVED}", 4, EAGER, tied)
    ours = train(f"{flags} {V}", 4, EAGER, tied)
    check_equal(plain, ours)
    check_order(ours, late=False)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--dualpipev-dw-detach"])
def test_experts_of_two_micro_batches_by_turns(words):
    flags = f"{PIPELINE} {EXPERTS} --no-gradient-accumulation-fusion"
    plain = train(f"{flags} {INTERLEAVED}", 4, EAGER)
    ours = train(f"{flags} {V} --moe-fb-overlap {words}", 4, COMPILED)
    check_equal(plain, ours)
    check_order(ours, late=bool(words), turns=True)
    assert all(events(output).count("turn") > 3 * 4 for output in ours.output)
    apart = train(f"{flags} {V} {words}", 4, COMPILED)
    assert apart.losses == ours.losses and apart.grad_norms == ours.grad_norms
