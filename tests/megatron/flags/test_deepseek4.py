"""DeepSeek-V4 by MindSpeed-LLM's flags: attention, streams, experts and multi-token prediction by formula, beside
transformers' model, and in one graph."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch.nn import functional

from mindspeed_fx.megatron.deepseek4 import rotation, streams
from mindspeed_fx.megatron.deepseek4.settings import settings_of
from mindspeed_fx.megatron.model_parts import add_parts
from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder
from tests.megatron.flags.deepseek4_formulas import (
    EXPERTS,
    HEADS,
    HIDDEN,
    ROTATED,
    VOCABULARY,
    K,
    around_by_formula,
    assert_same_gradients,
    attention_by_formula,
    build,
    experts_by_formula,
    frequencies_by_formula,
    gated,
    logits_by_formula,
    norm,
    streams_by_formula,
)
from tests.megatron.flags.deepseek4_runs import DEEPSEEK4, LENGTH
from tests.megatron.flags.values import apply

pytestmark = pytest.mark.usefixtures("on_one_rank")


@pytest.fixture(autouse=True)
def scale():
    """Of the losses of indexers and routers; what they log is taken away."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.25))
    yield 0.25
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    DSAIndexerLossLoggingHelper.tracker.clear()
    get_moe_layer_wise_logging_tracker().clear()


@pytest.mark.parametrize("place", range(4))
def test_attention_by_formula(place, scale):
    """A window alone, overlapping pools with an indexer, pools, and again: values and gradients of all weights."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    args, model = build()
    attention = model.decoder.layers[place].self_attention
    assert attention.ratio == [1, 4, 6, 4][place]
    torch.manual_seed(1)
    x = torch.randn(LENGTH, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    expected, loss = attention_by_formula(args, attention, x)
    found, bias = attention(x)
    assert bias is None and (loss is not None) == (place in (1, 3))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # angles are float32
    towards = torch.randn_like(x)
    total = (expected * towards).sum() + (0 if loss is None else scale * loss)
    leaves = [x, *attention.parameters()]
    for one, other in zip(torch.autograd.grad((found * towards).sum(), leaves), torch.autograd.grad(total, leaves)):
        assert other.abs().max() > 1e-7
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    if loss is not None:
        assert DSAIndexerLossLoggingHelper.tracker["values"][place] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("per_token, parts, factor", [(False, 1, 1.0), (False, 4, 0.25), (True, 1, 6.0)])
def test_scale_of_an_indexers_loss(scale, per_token, parts, factor):
    """Where Megatron divides gradients by the number of all tokens at last, the loss of a mean is times its tokens."""
    from mindspeed_fx.megatron.sparse_attention import attach_loss

    _, model = build(calculate_per_token_loss=per_token)
    out, loss = torch.randn(3, 2, 8, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    attached = attach_loss(out, loss, 0, model.config, parts)
    to_out, to_loss = torch.autograd.grad(attached.sum(), (out, loss))
    assert torch.equal(to_out, torch.ones_like(out)) and to_loss == scale * factor


def test_frequencies():
    args, model = build()
    for pooled in (False, True):
        assert rotation.frequencies(settings_of(args), ROTATED, pooled) == pytest.approx(
            frequencies_by_formula(args, pooled)
        )
    changed = [a / b for a, b in zip(*(rotation.frequencies(settings_of(args), 64, p) for p in (True, False)))]
    assert changed[0] == pytest.approx(1) and changed[-1] < 0.1  # the slow ones are divided by the factor


@pytest.mark.parametrize("is_first", [True, False])
def test_experts_by_formula(is_first):
    """By a table in the first layer, by scores and biases in others."""
    _, model = build(moe_aux_loss_coeff=0.0)
    layer = model.decoder.layers[0 if is_first else 1].mlp
    torch.manual_seed(1)
    x = torch.randn(5, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, VOCABULARY, (5, 2)) if is_first else None
    if is_first:
        assert layer.router.tid2eid[[0, 9, 63]].tolist() == [[0, 1, 2], [1, 2, 3], [7, 0, 1]]
        layer.router.tid2eid.copy_(torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(VOCABULARY)]))
    expected, counts = experts_by_formula(layer, x, tokens)
    found, _ = layer(x, padding_mask=None if tokens is None else tokens.T)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if not is_first:
        assert torch.equal(layer.router.local_tokens_per_expert.float(), counts)
    assert_same_gradients(found, expected, [x, *layer.parameters()], rtol=1e-7, atol=1e-9)
    with pytest.raises(ValueError, match="no mask of padding"):
        layer.router(x, torch.zeros(5, 2, dtype=torch.bool) if not is_first else None)


@pytest.mark.parametrize("is_first", [True, False])
def test_loss_of_sequences(is_first, scale):
    """E / (k T) of the tokens that an expert has, or would have without a bias, times its mean share."""
    _, model = build(moe_aux_loss_coeff=0.3)
    router = model.decoder.layers[0 if is_first else 1].mlp.router
    torch.manual_seed(1)
    x = torch.randn(5, 2, HIDDEN, dtype=torch.float64)
    tokens = torch.randint(0, VOCABULARY, (5, 2)) if is_first else None
    p = functional.softplus(x @ router.weight.T).sqrt()
    share = p / p.sum(-1, keepdim=True)
    chosen = router.tid2eid[tokens] if is_first else share.topk(K).indices
    counts = functional.one_hot(chosen, EXPERTS).sum((0, 2))
    loss = 0.3 * (share.mean(0) * counts * EXPERTS / (K * 5)).sum(-1).mean()
    probs, _ = router(x, tokens)
    (found,) = torch.autograd.grad((probs * 0).sum(), router.weight)
    (expected,) = torch.autograd.grad(scale * loss, router.weight)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_a_layer_by_formula():
    """Streams around attention and experts: values, and gradients of the weights of the streams."""
    args, model = build(moe_aux_loss_coeff=0.0)
    layer = model.decoder.layers[0].eval()
    torch.manual_seed(1)
    x = torch.randn(LENGTH, 2, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, VOCABULARY, (LENGTH, 2))
    attend = lambda x: layer.self_attention(norm(layer.input_layernorm, x))[0]  # noqa: E731
    mix = lambda x: experts_by_formula(layer.mlp, norm(layer.pre_mlp_layernorm, x), tokens)[0]  # noqa: E731
    expected = around_by_formula(layer.mlp_mhc, around_by_formula(layer.attn_mhc, x, attend), mix)
    found, _ = layer(x, padding_mask=tokens.T)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    leaves = [x, *layer.attn_mhc.parameters(), *layer.mlp_mhc.parameters()]
    assert_same_gradients(found, expected, leaves, rtol=1e-6, atol=1e-8)
    _, _, matrix = layer.attn_mhc(x)
    torch.testing.assert_close(matrix.sum(-2), torch.ones_like(matrix.sum(-1)), rtol=1e-4, atol=0)
    nearly = streams.sinkhorn(torch.randn(7, 4, 4, dtype=torch.float64), 40, 1e-9)
    for dim in (-1, -2):
        torch.testing.assert_close(nearly.sum(dim), torch.ones(7, 4).double(), rtol=1e-4, atol=0)


def test_a_model_by_formula():
    _, model = build()
    model.eval()
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    x = model.embedding.word_embeddings.weight[ids.T].unsqueeze(2).expand(-1, -1, 3, -1)
    for layer in model.decoder.layers:
        x, _ = layer(x, padding_mask=ids)
    expected, _ = logits_by_formula(model, ids, x)
    found = model(input_ids=ids, position_ids=None, attention_mask=None)
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=1e-9, atol=1e-9)
    # a later token changes no earlier logits
    other = ids.clone()
    other[:, -3:] = (other[:, -3:] + 1) % VOCABULARY
    changed = model(input_ids=other, position_ids=None, attention_mask=None)
    torch.testing.assert_close(changed[:, :-3], found[:, :-3])
    assert (changed - found).abs().max() > 1e-3


def test_multi_token_prediction_by_formula():
    """It begins with one stream before the last norm; its layer has streams, sees its window and has no table."""
    _, model = build(ahead=1, mtp_loss_scaling_factor=0.5)
    model.eval()
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    table, ahead = model.embedding.word_embeddings.weight, model.mtp.layers[0]
    assert ahead.transformer_layer.self_attention.ratio == 1
    assert not hasattr(ahead.transformer_layer.mlp.router, "tid2eid")
    found, hidden = [], []
    model.decoder.register_forward_hook(lambda m, i, out: hidden.append(out))
    model.output_layer.register_forward_pre_hook(lambda m, i: found.append(i[0]))
    model(input_ids=ids, position_ids=torch.arange(LENGTH).expand_as(ids), attention_mask=None, labels=ids)
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    both = torch.cat([norm(ahead.enorm, table[following.T]), norm(ahead.hnorm, hidden[0])], -1)
    start = both @ ahead.eh_proj.weight.T
    inner = copy.copy(ahead.transformer_layer)
    x, _ = type(inner).forward(inner, start.unsqueeze(2).expand(-1, -1, 3, -1))
    one = torch.stack([torch.stack([streams_by_formula(ahead.hc_head, t)[0] @ t for t in row]) for row in x])
    torch.testing.assert_close(found[0], norm(ahead.final_layernorm, one), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], norm(model.final_layernorm, hidden[0]), rtol=1e-9, atol=1e-9)


def test_gates_are_clamped():
    args = apply("--swiglu --swiglu-limit 0.5 --ffn-hidden-size 64")
    assert (args.activation_func_clamp_value, args.bias_swiglu_fusion) == (0.5, False)
    _, model = build(activation_func_clamp_value=0.5, bias_activation_fusion=False)
    layer = model.decoder.layers[0].mlp
    x = torch.randn(5, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    for mlp in (layer.shared_experts, layer.experts.local_experts[0]):
        found, expected = mlp(x)[0] if mlp is not layer.shared_experts else mlp(x), gated(mlp, x, 0.5)
        assert (found - gated(mlp, x)).abs().max() > 1e-3
        torch.testing.assert_close(found, expected)
        assert_same_gradients(found, expected, [x, *mlp.linear_fc1.parameters()])


def test_messages_between_stages(monkeypatch):
    from mindspeed_fx.megatron import run_arguments

    assert streams.message_shape([16, 2, 32]) == [16, 2, 32]
    args = apply(DEEPSEEK4)
    monkeypatch.setattr(streams, "training_arguments", lambda: args)
    assert streams.message_shape([16, 2, 32]) == (16, 2, 3, 32) and streams.message_shape(None) is None
    assert run_arguments.training_arguments is not streams.training_arguments


def test_streams_of_a_16_bit_model_are_float32():
    """And buckets that one message gathers over gloo have one type, also in a chunk without bucketing."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    _, model = build(bf16=True, params_dtype=torch.bfloat16, moe_router_dtype="fp32")
    model.bfloat16()
    streams.widen(model)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {n for n in kinds if ".hc_" in f".{n}"}
    layer, x = model.decoder.layers[1], torch.randn(LENGTH, 2, 3, HIDDEN).bfloat16()
    assert layer(x)[0].dtype == torch.bfloat16
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(model.config, settings, model, disable_bucketing=True)
    groups = [{bucket.param_data.dtype for bucket in group.buckets} for group in ddp.bucket_groups]
    assert sorted(groups, key=str) == [{torch.bfloat16}, {torch.float32}]


def test_layers_that_do_nothing_are_left_out():
    args = apply(f"{DEEPSEEK4} --noop-layers 0,2 --n-hash-layers 2")
    assert args.num_layers == 2 and args.ratios_of_layers == [4, 4] and args.table_layers == 1


def test_checkpoints_have_all_weights():
    """Of Megatron's dist_checkpointing: layers one by one, for they are of several kinds; sinks by their heads."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    _, model = build(ahead=1)
    state = model.sharded_state_dict()
    kept = {name for name in model.state_dict() if not name.endswith("_extra_state")}
    assert kept <= set(state) and "decoder.layers.0.mlp.router.tid2eid" in kept
    assert "decoder.layers.0.mlp.router.expert_bias" not in kept
    sinks = state["decoder.layers.2.self_attention.attn_sink"]
    assert isinstance(sinks, ShardedTensor) and sinks.key == "decoder.layers.2.self_attention.attn_sink"
    assert sinks.global_shape == (HEADS,) and torch.equal(sinks.data, model.decoder.layers[2].self_attention.attn_sink)


def test_a_table_on_another_stage_is_refused():
    args, model = build()
    model.pre_process = False
    model.decoder.layers = model.decoder.layers[:1]
    with pytest.raises(ValueError, match="layer 1 is on a stage that is not told the tokens"):
        add_parts(model, args)


def test_biases_move_without_those_of_tables():
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    _, model = build()
    before = [layer.mlp.router.expert_bias.clone() for layer in model.decoder.layers[1:]]
    load = torch.arange(EXPERTS).float()
    for layer in model.decoder.layers[1:]:
        layer.mlp.router.local_tokens_per_expert.copy_(load)
    finalize_model_grads._update_router_expert_bias([model], model.config)
    for layer, bias in zip(model.decoder.layers[1:], before):
        torch.testing.assert_close(layer.mlp.router.expert_bias, bias + (load.mean() - load).sign() * 1e-3)


RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize(
    "config",
    [
        dict(ahead=0, flags="--compress-ratios 4 6", layers=2),
        pytest.param(dict(ahead=1), marks=pytest.mark.slow),
        pytest.param(dict(ahead=1, **RECOMPUTED), marks=pytest.mark.slow),
    ],
)
def test_one_graph(config):
    """Compiled as eager, with gradients and multi-token prediction; recomputed as not."""
    from tests.megatron.gpt_models import batch, train
    from tests.models import fusion_counts

    plain = {name: value for name, value in config.items() if name not in RECOMPUTED}
    results = []
    for is_compiled, fields in ((False, plain), (False, config), (True, config)):
        _, model = build(moe_router_dtype="fp32", **fields)
        compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
        with recorder.collecting() as graphs:
            results.append(train(model, batch(seq=LENGTH), compiled if is_compiled else None))
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        for name, gradient in results[0][1].items():
            torch.testing.assert_close(grads[name], gradient, rtol=1e-5, atol=1e-7)
    counts = fusion_counts(Report(list(graphs), []))
    layers = len(model.decoder.layers) + config["ahead"]
    assert counts["fusion.sinkhorn_knopp"] == 2 * layers and counts["fusion.attention"] == layers, counts
