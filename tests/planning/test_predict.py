"""Seconds and bytes of a described run: against counts by hand, against the played pipeline, and in their order."""

import dataclasses
from unittest import mock

import pytest

from mindspeed_fx.cost.hardware import hardware, names
from mindspeed_fx.cost.pipeline import Parts, one_f_one_b, play
from mindspeed_fx.cost.training import ERRORS, FITTED, UNFITTED, interval_of, training_constants
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict import (
    Architecture,
    Settings,
    architecture,
    best_settings,
    predict,
    settings_from_flags,
)
from mindspeed_fx.planning.predict.architectures import PUBLISHED
from mindspeed_fx.planning.predict.best import complexity
from mindspeed_fx.planning.predict.layer_work import UNFUSED, LayerBuilder, LayerWork
from mindspeed_fx.planning.predict.memory import peak_memory
from mindspeed_fx.planning.predict.step_work import step_work
from mindspeed_fx.planning.predict.timing import ranks_per_node, time_step

LLAMA = architecture("llama-7b")
RUN = Settings(devices=8, sequence=4096, microbatch=1, batch=256, pp=2, zero=1)

COUNTS = {  # billions, from the publishers' pages
    "llama-7b": 6.74,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405.9,
    "mpt-1b": 1.316,
    "mixtral-8x7b": 46.7,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "deepseek-v3": 671.0,
    "deepseek-v2-lite": 15.7,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "gemma-7b": 8.54,
}


def test_a_product_is_priced_by_its_tokens_columns_and_depth():
    builder, work = LayerBuilder(LLAMA, RUN), mock.Mock()
    builder._matmul = lambda *shape: shape
    builder.product(work, "dense products", 3, 5, 7, trained=False)
    work.forward.add.assert_called_once_with("dense products", (3, 5, 7))
    work.backward.add.assert_called_once_with("dense products", (3, 7, 5))


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_that_publishers_count(name):
    assert architecture(name).parameters / 1e9 == pytest.approx(COUNTS[name], rel=0.02)


def test_flags_of_megatron_make_the_same_model():
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu "
        "--vocab-size 32000 --normalization RMSNorm --untie-embeddings-and-output-weights "
        "--position-embedding-type rope"
    ).split()
    assert architecture(flags) == LLAMA
    experts = [*flags, "--num-experts", "8", "--moe-router-topk", "2", "--noop-layers", "30,31"]
    made = architecture(experts)
    assert (made.layers, made.experts, made.top_k, made.expert_ffn, made.moe_layers) == (30, 8, 2, 11008, 30)


@pytest.mark.parametrize(
    "model, run, word",
    [
        ("llama3-8c", {}, "llama3-8b"),
        ({"layer": 3}, {}, "layers"),
        (["--num-layers", "3"], {}, "--hidden-size"),
        (LLAMA, {"recompute": "some"}, "selective"),
        (LLAMA, {"microbatches": 3}, "microbatch"),
        (LLAMA, {"tp": 3}, "divide"),
        (LLAMA, {"batch": 9, "microbatch": 2}, "multiple"),
        (LLAMA, {"tp": 0}, "whole number"),
    ],
)
def test_what_is_wrong_is_said(model, run, word):
    with pytest.raises(OptionError, match=word):
        predict(model, {"devices": 8, "sequence": 4096, **run})


def test_products_of_a_layer_are_six_flop_for_each_parameter_and_token():
    run = dataclasses.replace(RUN, pp=1, batch=8)
    work = LayerWork()
    builder = LayerBuilder(LLAMA, run)
    builder.attention(work)
    builder.dense(work)
    flops = sum(k.cost.matrix for p in (work.forward, work.backward) for k in p.kernels if "products" in k.part)
    weights = LLAMA.attention_parameters + LLAMA.dense_parameters
    assert flops == 6 * weights * 4096
    scores = sum(k.cost.matrix for k in work.forward.kernels if k.part == "attention")
    assert scores == 4 * 4096 * 32 * (4096 * 4097 // 2) // 32


@pytest.mark.parametrize("batch", [9, 18, 21, 7])
def test_any_number_of_sequences_can_be_asked(batch):
    made = predict(LLAMA, {"devices": 8, "sequence": 4096, "tp": 8, "batch": batch})
    assert made.settings.microbatches == batch and made.seconds > 0


def test_a_pipeline_takes_as_long_as_it_is_played():
    hw = hardware("ascend910b2")
    constants = dataclasses.replace(training_constants(hw), exposed_sends=0.0, microbatch=0.0, step=0.0, framework={})
    model = dataclasses.replace(LLAMA, vocab=8)  # neither embedding nor head to speak of
    run = Settings(devices=4, sequence=4096, batch=16, pp=4)
    timing = time_step(model, run, step_work(model, run), hw, constants)
    busy = sum(timing.parts[k] for k in timing.parts if k not in ("bubble", "optimizer", "stages", "step"))
    one = busy / 16
    played = play(one_f_one_b(4, 16), Parts(one / 3, 0.0, one / 3, one / 3))
    assert busy + timing.parts["bubble"] == pytest.approx(played.seconds, rel=0.03)


def test_between_stages_half_the_tokens_take_half_the_time():
    hw = hardware("ascend910b2")
    constants = dataclasses.replace(training_constants(hw), exposed_sends=1.0)

    def sends(sequence):
        run = dataclasses.replace(RUN, sequence=sequence)
        return time_step(LLAMA, run, step_work(LLAMA, run), hw, constants).parts["stages"]

    short, middle, long = sends(4096), sends(8192), sends(12288)
    assert middle - short == pytest.approx(long - middle) and middle > 1.5 * short


def test_tokens_per_second_are_those_of_a_device():
    made = predict(LLAMA, RUN)
    assert made.tokens_per_second * made.seconds * RUN.devices == pytest.approx(RUN.batch * RUN.sequence)


def test_virtual_stages_divide_the_bubble():
    one = predict(LLAMA, dataclasses.replace(RUN, pp=4, batch=32))
    two = predict(LLAMA, dataclasses.replace(RUN, pp=4, batch=32, vpp=2))
    assert two.parts["bubble"] == pytest.approx(one.parts["bubble"] / 2, rel=0.01)


@pytest.mark.parametrize(
    "slower",
    [
        {"recompute": "full"},
        {"fused": ("attention", "rope", "rms_norm")},
        {"fused": ("swiglu", "rope", "rms_norm")},
        {"precision": "float32"},
        {"batch": 512},
        {"tp": 8, "pp": 1},
        {"framework": "legacy"},
        {"offload": "activations"},
    ],
)
def test_what_costs_time_does(slower):
    assert predict(LLAMA, dataclasses.replace(RUN, **slower)).seconds > predict(LLAMA, RUN).seconds


@pytest.mark.parametrize(
    "smaller",
    [
        {"recompute": "full"},
        {"recompute_activation": True},
        {"zero": 3},
        {"offload": "optimizer"},
        {"lora": 16},
        {"reuse_float32": True},
        {"tp": 2},
        {"offload": "attention"},
        {"recompute_norms": True},
    ],
)
def test_what_saves_memory_does(smaller):
    less, more = (peak_memory(LLAMA, r) for r in (dataclasses.replace(RUN, **smaller), RUN))
    assert less.peak < more.peak


def test_memory_of_parameters_is_eighteen_bytes_each():
    run = Settings(devices=8, sequence=4096, batch=8, pp=8)
    parts = peak_memory(dataclasses.replace(LLAMA, vocab=8), run).parts
    static = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert static / 18 == pytest.approx(4 * (LLAMA.attention_parameters + LLAMA.dense_parameters), rel=0.001)


def test_groups_lie_in_the_machine_from_the_inside():
    run = Settings(devices=64, sequence=4096, tp=4, cp=2, pp=2)
    assert {g: ranks_per_node(run, g, 8) for g in ("tp", "cp", "dp", "pp")} == {
        "tp": (4, 4),
        "cp": (2, 2),
        "dp": (8, 2),
        "pp": (2, 1),
    }


def test_intervals_and_devices_without_a_fit():
    import mindspeed_fx

    assert mindspeed_fx.predict is predict
    made = predict(LLAMA, RUN)
    low, high = made.interval
    assert low < made.seconds < high and "fitted to" in str(made) and "MFU" in str(made)
    other = predict(LLAMA, dataclasses.replace(RUN, batch=256), "ascend950pr")
    assert other.basis == "by data sheet alone" and "by data sheet alone" in str(other)
    assert other.interval[1] / other.seconds == pytest.approx(interval_of(hardware("ascend950pr"), "dense")[1])
    assert all(0 < e < UNFITTED for group in ERRORS.values() for e in group.values())


def test_every_device_is_fitted_or_says_that_it_is_not():
    fitted = {n for n in names() if len(hardware(n).fitted) >= 3}
    assert fitted == {"ascend910b1", "ascend910b2", "ascend910b3", "ascend910b4", "ascend910b4-1", "h100", "h200"}
    assert all(hardware(n).basis == "by data sheet alone" for n in names() if n not in fitted)


def test_training_constants_have_source_spread_and_confidence():
    for record in FITTED.values():
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            for c in value.values() if field.name == "framework" else [value]:
                assert c.source and c.spread > 0 and c.confidence in ("high", "medium", "low"), field.name


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_published_model_is_predicted(name):
    model = architecture(name)
    run = Settings(devices=64, sequence=2048, tp=1, ep=8 if model.experts and model.experts % 8 == 0 else 1)
    made = predict(model, run, "h100")
    assert 0 < made.mfu < 1 and made.memory.peak > 16 * 2**20


def test_an_architecture_is_whole():
    made = Architecture(2, 64, 4, 100, 256)
    assert (made.dim, made.groups, made.moe_layers) == (16, 4, 0)


def test_a_searched_plan_has_an_interval_and_takes_what_is_fixed():
    import torch

    import mindspeed_fx
    from benchmarks.plan_models import llama_8b
    from mindspeed_fx.sharding.plan import ShardingError

    with torch.device("meta"):
        model, args = llama_8b(layers=2, batch=18, length=1024)
    made = mindspeed_fx.plan(model, args, mesh={"dp": 2}, hardware="ascend910b2", microbatches=9, recompute="full")
    assert made.layout.microbatches == 9 and made.layout.recompute == "full"
    low, high = made.interval
    assert low < made.seconds < high and f"{high * 1e3:.1f} ms" in str(made) and "fitted to" in str(made)
    assert made.summary()["plans"][0]["interval"] == [low, high]
    with pytest.raises(ShardingError, match="7 microbatches"):
        mindspeed_fx.plan(model, args, mesh={"dp": 2}, hardware="ascend910b2", microbatches=7)
    with pytest.raises(OptionError, match="zero3"):
        mindspeed_fx.plan(model, args, mesh={"dp": 2}, hardware="ascend910b2", zero="zero4")


def test_open_settings_are_searched():
    found = best_settings("llama3-8b", {"devices": 8, "sequence": 8192, "batch": 64}, "ascend910b2")
    assert all(p.memory.peak <= 0.9 * 64 * 2**30 for p in found.predictions)
    assert found.best.seconds <= 1.02 * min(p.seconds for p in found.predictions)
    fixed = best_settings("llama3-8b", {"devices": 8, "sequence": 8192, "batch": 64, "tp": 8, "recompute": "full"})
    assert fixed.best.settings.tp == 8 and fixed.best.settings.recompute == "full"
    assert fixed.best.seconds >= found.best.seconds / 1.02
    with pytest.raises(OptionError, match="fits"):
        best_settings("llama3-405b", {"devices": 8, "sequence": 8192, "batch": 64})
    with pytest.raises(OptionError, match="batch"):
        best_settings("llama3-8b", {"devices": 8, "sequence": 8192})
    equal = [p for p in found.predictions if p.seconds <= 1.02 * found.best.seconds]
    assert all(complexity(found.best.settings) <= complexity(p.settings) for p in equal)


def test_settings_of_a_launch():
    flags = (
        "--num-layers 32 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --seq-length 4096 --bf16 "
        "--micro-batch-size 1 --global-batch-size 32 --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --use-distributed-optimizer "
        "--use-flash-attn --overlap-grad-reduce"
    ).split()
    run = settings_from_flags(flags, 8)
    assert (run.tp, run.pp, run.vpp, run.dp, run.microbatches, run.zero) == (2, 4, 4, 1, 32, 1)
    assert (run.recompute, run.recompute_layers, run.fused) == ("full", 1, ("attention",))
    assert run.overlap_gradients and not run.overlap_parameters and run.precision == "bfloat16"


def test_what_a_chain_hands_on_stays_in_a_cache_that_holds_it():
    """An unfused norm of 4096 x 4096 lives in the 192 MiB of a 910B, one of four times the rows does not; the gain of
    fusing it is what the cache does not take."""
    lean, chain = (
        dataclasses.replace(RUN, fused=f)
        for f in (("attention", "swiglu", "rope", "rms_norm"), ("attention", "swiglu", "rope"))
    )

    def extra(microbatch, device="ascend910b2"):
        runs = (dataclasses.replace(r, microbatch=microbatch) for r in (lean, chain))
        fused, unfused = (predict(LLAMA, r, device).parts["vector"] for r in runs)
        return unfused - fused  # of the whole batch

    assert extra(4) > 2 * extra(1)
    assert extra(4, "h100") == pytest.approx(extra(1, "h100"), rel=0.1)  # without a rate for its cache


def counted(function, *inputs):
    """Bytes and kernels of a 16-bit pointwise function, operator by operator, for each element of the first input."""
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from mindspeed_fx.cost.graph import estimate

    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in inputs]
        made = estimate(make_fx(function)(*tensors), "ascend910b2")
    return float(made.bytes) / tensors[0].numel(), made.kernels


def test_a_chain_of_gelu_is_what_megatron_writes():
    import torch

    def forward(y, bias):
        x = bias + y
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    def backward(g, bias, y):
        x = bias + y
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        ff = 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)
        return (ff * g).sum(0)

    size = (4096, 1024)
    for function, inputs, (nbytes, count) in (
        (forward, (size, (1024,)), UNFUSED["gelu"][2]),
        (backward, (size, (1024,), size), UNFUSED["gelu"][3]),
    ):
        moved, kernels = counted(function, *inputs)
        assert moved == pytest.approx(nbytes, rel=0.02) and kernels == count


@pytest.mark.parametrize(
    "flag, is_chain",
    [("--bf16", True), ("--no-bias-gelu-fusion", False), ("--disable-bias-linear", False), ("--swiglu", False)],
)
def test_the_chain_of_a_launch(flag, is_chain):
    assert settings_from_flags(["--seq-length", "4096", flag], devices=8).gelu_chain is is_chain


def test_a_chain_of_gelu_takes_longer_where_there_is_no_gate():
    for name, longer in (("gpt3-5b", True), ("llama-7b", False)):
        runs = (dataclasses.replace(RUN, gelu_chain=on) for on in (False, True))
        fused, chain = (predict(name, run, "ascend910b2").parts["vector"] for run in runs)
        assert (chain > 1.5 * fused) is longer and (chain == fused) is not longer


def test_products_that_add_to_float32_gradients_move_them():
    fused, plain = (
        predict(LLAMA, dataclasses.replace(RUN, fused=f), "ascend910b2").parts["gradients"]
        for f in (("attention", "matmul_add"), ("attention",))
    )
    assert fused / plain == pytest.approx(8 / 10, abs=0.02)


def test_gradients_of_16_bits_are_added_too_where_there_is_a_buffer_of_them():
    """Megatron's main gradients have the gradients' type then; ZeRO of torch and DeepSpeed keeps what it reduced."""
    lean = dataclasses.replace(RUN, float32_gradients=False, fused=("attention",))
    wide = predict(LLAMA, dataclasses.replace(lean, float32_gradients=True), "ascend910b2").parts["gradients"]
    assert predict(LLAMA, lean, "ascend910b2").parts["gradients"] / wide == pytest.approx(6 / 10, abs=0.02)
    fused = dataclasses.replace(lean, fused=("attention", "matmul_add"))
    assert predict(LLAMA, fused, "ascend910b2").parts["gradients"] / wide == pytest.approx(4 / 10, abs=0.02)
    assert "gradients" not in predict(LLAMA, dataclasses.replace(lean, framework="fsdp"), "ascend910b2").parts


def test_collectives_in_n_pieces_wait_for_one_of_them():
    base = dataclasses.replace(RUN, tp=8, pp=1)
    waits = [
        predict(LLAMA, dataclasses.replace(base, overlap_tp=on, tp_chunks=n), "ascend910b2").parts["tp"]
        for on, n in ((False, 0), (True, 1), (True, 2), (True, 4), (True, 0))
    ]
    assert waits == sorted(waits, reverse=True) and waits[0] == waits[1]
    whole, half, quarter, least = waits[0], *waits[2:]
    assert half - least == pytest.approx((whole - least) / 2) and quarter - least == pytest.approx((whole - least) / 4)
    flags = ["--seq-length", "4096", "--use-ascend-coc", "--coc-parallel-num", "4", "--tensor-model-parallel-size", "8"]
    assert settings_from_flags(flags, devices=8).hidden_tp == 0.75


def test_gradients_of_virtual_stages_are_sent_behind_the_passes_that_follow():
    """Of two virtual stages the one that ends first has a whole pass of the other behind it."""
    slow = dataclasses.replace(RUN, devices=16, tp=1, pp=2, batch=64, overlap_gradients=True)
    one, two = (predict(LLAMA, dataclasses.replace(slow, vpp=v), "ascend910b2").parts["dp"] for v in (1, 4))
    assert two <= one


def test_stages_may_count_embedding_and_head_as_layers():
    run = dict(devices=1024, sequence=8192, tp=8, pp=16, vpp=8, batch=64, zero=1)
    assert predict("llama3-405b", run, "h100").seconds > 0
    with pytest.raises(OptionError, match="pp=16 x vpp=9 stages, and the model has 126 layers"):
        predict("llama3-405b", {**run, "vpp": 9}, "h100")
