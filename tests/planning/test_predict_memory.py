"""Layers of stages, what waits for its backward, and the buffers of a rank's peak: counted by hand, and by playing the
schedule."""

import dataclasses

import pytest

from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict import Settings, architecture, predict, settings_from_flags
from mindspeed_fx.planning.predict.architecture import from_flags
from mindspeed_fx.planning.predict.memory import MemoryModel, peak_memory
from mindspeed_fx.planning.predict.settings import FUSED
from mindspeed_fx.planning.predict.stages import Chunk, layout, most_alive
from mindspeed_fx.planning.predict.step_work import step_work

LLAMA = architecture("llama-7b")
DEEP = Settings(devices=4, sequence=4096, batch=16, pp=4)
MOE = dataclasses.replace(LLAMA, layers=4, experts=8, top_k=2, expert_ffn=1024, dense_layers=1)


def test_the_first_stage_waits_for_the_most_microbatches():
    assert [most_alive(DEEP, rank, [1.0]) for rank in range(4)] == [4, 3, 2, 1]


def played(run, rank, weights):
    """The largest sum while a rank runs Megatron's interleaved schedule, event by event."""
    p, v, m = run.pp, run.vpp, run.microbatches
    forwards = [(c, g + i) for g in range(0, m, p) for c in range(v) for i in range(p)]
    backwards = [(v - 1 - c, mb) for c, mb in forwards]
    before = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
    events = [(+1, f) for f in forwards[:before]]
    for f, b in zip(forwards[before:], backwards):
        events += [(+1, f), (-1, b)]
    alive, most = set(), 0
    for sign, pair in events:
        (alive.add if sign > 0 else alive.remove)(pair)  # a backward follows its own forward
        most = max(most, sum(weights[c] for c, _ in alive))
    return most


@pytest.mark.parametrize("pp, vpp, batch", [(2, 2, 4), (4, 2, 16), (4, 4, 32), (2, 3, 6), (4, 2, 4)])
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (5, 1, 2, 1), (0, 3, 1, 7)])
def test_chunks_that_wait_are_those_of_the_schedule(pp, vpp, batch, weights):
    run = Settings(devices=pp, sequence=4096, batch=batch, pp=pp, vpp=vpp)
    for rank in range(pp):
        assert most_alive(run, rank, list(weights[:vpp])) == played(run, rank, weights)


def test_the_schedule_before_version_0_9_runs_all_forwards_first():
    run = Settings(devices=2, sequence=4096, batch=2, pp=2, vpp=2, forwards_first=True)
    assert most_alive(run, 1, [1.0, 2.0]) == 2 * 3.0
    assert peak_memory(LLAMA, run).peak > peak_memory(LLAMA, dataclasses.replace(run, forwards_first=False)).peak
    more = dataclasses.replace(run, batch=4)
    assert most_alive(more, 1, [1.0, 2.0]) < 4 * 3.0  # of other numbers of microbatches it does not


def test_layers_of_stages():
    dense = layout(LLAMA, dataclasses.replace(DEEP, vpp=2))
    assert [s.layers for s in dense] == [8] * 4 and dense[0].chunks == (Chunk(4, 0, 0), Chunk(4, 0, 0))
    cut = dataclasses.replace(LLAMA, layers=14)
    run = dataclasses.replace(DEEP, pp=2, vpp=4, empty_layers=(1, 15))  # of 16 places
    assert [[c.layers for c in s.chunks] for s in layout(cut, run)] == [[1, 2, 2, 2], [2, 2, 2, 1]]
    first, last = layout(MOE, Settings(devices=2, sequence=64, pp=2))
    assert (first.dense, first.moe, last.dense, last.moe) == (1, 1, 0, 2)


def test_layers_of_further_tokens_are_the_last_stages_unless_only_with_them_it_divides():
    run = Settings(devices=2, sequence=64, pp=2)
    assert [(s.layers, s.mtp) for s in layout(dataclasses.replace(MOE, mtp_layers=1), run)] == [(2, 0), (2, 1)]
    uneven = dataclasses.replace(MOE, layers=3, mtp_layers=1)
    assert [(s.layers, s.mtp) for s in layout(uneven, run)] == [(2, 0), (2, 0)]
    more, less = (peak_memory(m, run).ranks[1] for m in (dataclasses.replace(MOE, mtp_layers=1), MOE))
    table = MOE.embedding_parameters
    assert more - less > 6 * table  # its own embedding, and the second loss


@pytest.mark.parametrize("per_rank, again", [(False, [1, 1]), (True, [1, 0])])
def test_recomputed_layers_are_counted_in_each_chunk_or_in_the_rank(per_rank, again):
    run = dataclasses.replace(DEEP, vpp=2, recompute="full", recompute_layers=1, recompute_per_rank=per_rank)
    assert [c.again for c in layout(LLAMA, run)[0].chunks] == again
    none = predict(LLAMA, dataclasses.replace(run, recompute="none"))
    all_of_them = predict(LLAMA, dataclasses.replace(run, recompute_layers=0))
    made = predict(LLAMA, run)
    assert none.seconds < made.seconds < all_of_them.seconds
    assert none.memory.peak > made.memory.peak > all_of_them.memory.peak


def test_zero_memory_of_experts_keeps_less_and_makes_it_again():
    run = Settings(devices=2, sequence=4096, ep=2, batch=8)
    none, half, least = (
        MemoryModel(MOE, dataclasses.replace(run, expert_memory=level)) for level in ("none", "level0", "level1")
    )
    assert none.layer(True).kept > half.layer(True).kept > least.layer(True).kept
    assert none.layer(True).working < least.layer(True).working
    assert none.layer(False) == least.layer(False)


def test_masks_of_dropout_are_bits_on_an_npu_and_bytes_elsewhere():
    run = Settings(devices=1, sequence=4096)
    extra = {
        target: MemoryModel(LLAMA, dataclasses.replace(run, dropout=True), target).layer(False).kept
        - MemoryModel(LLAMA, run, target).layer(False).kept
        for target in ("npu", "cuda")
    }
    assert extra == {"npu": 4096 * 4096 / 4, "cuda": 2 * 4096 * 4096}


def test_fused_products_and_collectives_keep_a_gathered_input():
    run = Settings(devices=8, sequence=4096, tp=8, overlap_tp=True)
    kept = [MemoryModel(LLAMA, r).layer(False).kept for r in (run, dataclasses.replace(run, tp_chunks=4))]
    assert kept[0] - kept[1] == 2 * LLAMA.hidden * 4096 * 7 / 8  # in pieces it does not


def test_the_update_copies_the_largest_gradient_or_all_16_bit_ones():
    run = Settings(devices=8, sequence=64, tp=2, zero=1, batch=4)
    model, own = MemoryModel(LLAMA, run), 1e9
    assert model._update_buffer((own, 0.0), 3e8) == 4 * 3e8
    assert model._update_buffer((1e8, 0.0), 3e8) == 4 * 1e8  # no more than the rank's share
    half = MemoryModel(LLAMA, dataclasses.replace(run, precision="float16", float32_gradients=False))
    assert half._update_buffer((own, 0.0), 3e8) == 4 * own


def test_adapters_have_products_and_sums_and_no_gradients_of_weights():
    full, adapted = (step_work(LLAMA, Settings(devices=1, sequence=4096, lora=n)) for n in (0, 16))
    names = lambda work: [k.part for k in work.kernels]  # noqa: E731
    assert "adapters" not in names(full.dense.forward) and "gradients" not in names(adapted.dense.backward)
    assert names(adapted.dense.forward).count("adapters") == 4 * 3  # of four products: two and their sum
    products = sum(k.cost.matrix for k in adapted.dense.forward.kernels if k.part == "adapters")
    widths = [(4096, 3 * 4096), (4096, 4096), (4096, 2 * 11008), (11008, 4096)]
    assert products == sum(2 * 4096 * 16 * (a + b) for a, b in widths)


def test_flags_of_a_launch_that_change_stages_and_memory():
    flags = (
        "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --geglu --noop-layers 1,15 "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --recompute-norm "
        "--moe-zero-memory level1 --output-layer-slice-num 10 --enable-recompute-layers-per-pp-rank --moe-tp-extend-ep "
        "--tensor-model-parallel-size 2 --bf16 --hidden-dropout 0.0 --use-mc2"
    ).split()
    run = settings_from_flags(flags, 8)
    assert from_flags(flags).layers == 14 and from_flags(flags).gated
    assert (run.empty_layers, run.vpp, run.loss_chunks, run.expert_memory) == ((1, 15), 4, 10, "level1")
    assert run.recompute_norms and run.recompute_per_rank and run.etp == 1 and run.overlap_tp and not run.dropout
    assert settings_from_flags([f for f in flags if f not in ("--hidden-dropout", "0.0")], 8).dropout
    assert set(run.fused) <= set(FUSED)


@pytest.mark.parametrize("places", ["1,15", (1, -2), (True,), (1.5,)])
def test_places_without_layers_are_whole_numbers(places):
    with pytest.raises(OptionError, match="empty_layers"):
        Settings(devices=8, sequence=4096, empty_layers=places)


def test_zero_memory_of_experts_takes_the_time_of_what_it_makes_again():
    run = Settings(devices=2, sequence=4096, ep=2, batch=8)
    none, half, least = (
        predict(MOE, dataclasses.replace(run, expert_memory=level)).seconds for level in ("none", "level0", "level1")
    )
    assert none < half < least < predict(MOE, dataclasses.replace(run, recompute="full")).seconds
