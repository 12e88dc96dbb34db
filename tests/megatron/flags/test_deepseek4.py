"""DeepSeek-V4 by MindSpeed-LLM's flags: attention, streams, experts and multi-token prediction by formula, beside
transformers' model, and in one graph."""

from __future__ import annotations

import copy
import importlib
import math

import pytest
import torch
from torch.nn import functional

from mindspeed_fx.megatron.deepseek4 import layer as layer_specs
from mindspeed_fx.megatron.deepseek4 import rotation, streams
from mindspeed_fx.megatron.deepseek4.settings import settings_of
from mindspeed_fx.megatron.model_parts import add_parts
from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder
from tests.megatron.flags.deepseek4_runs import DEEPSEEK4, LENGTH, WINDOW
from tests.megatron.flags.values import apply

pytestmark = pytest.mark.usefixtures("on_one_rank")
HIDDEN, HEADS, WIDTH, ROTATED, RANK, VOCABULARY, EXPERTS, K = 32, 4, 8, 4, 24, 64, 8, 3


def build(flags="", ahead=0, layers=4, **more):
    """(flags, GPTModel of DeepSeek-V4's layers in float64 with random weights of all kinds)."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    from tests.megatron.gpt_models import tiny_gpt

    args = apply(f"{DEEPSEEK4.replace('--num-layers 4', f'--num-layers {layers}')} {flags}")
    args.padded_vocab_size = VOCABULARY
    torch.manual_seed(0)
    fields = dict(
        moe_router_load_balancing_type=args.moe_router_load_balancing_type,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        moe_router_score_function=args.moe_router_score_function,
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=1.5,
        moe_router_topk=K,
        moe_router_dtype="fp64",
        moe_shared_expert_intermediate_size=16,
        qk_head_dim=WIDTH,
        qk_pos_emb_head_dim=ROTATED,
        init_method_std=0.3,
        mtp_num_layers=ahead or None,
    )
    config = tiny_gpt(layers=layers, latent=True, experts=EXPERTS, **{**fields, **more}).config
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm", multi_latent_attention=True,
        qk_layernorm=True,
    )  # fmt: skip
    settings = settings_of(args)
    after = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if ahead else None
    model = GPTModel(
        config, layer_specs.make_layers(spec, settings), vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        position_embedding_type="rope", mtp_block_spec=layer_specs.make_layers(after, settings),
    )  # fmt: skip
    add_parts(model, args)
    model.double()
    shake(model)
    return args, model


def shake(model):
    """Random values where weights begin with zeros and ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            if any(word in name for word in ("hc_base", "hc_scale", "attn_sink")):
                parameter.copy_(torch.randn_like(parameter))
        for router in (m for m in model.modules() if getattr(m, "expert_bias", None) is not None):
            router.expert_bias.copy_(torch.randn(EXPERTS) * 0.1)


def turned(x, position, frequency, back=False):
    """The last channels of one vector as complex numbers."""
    kept, last = x[..., :-ROTATED], x[..., -ROTATED:]
    numbers = torch.view_as_complex(last.reshape(*last.shape[:-1], -1, 2).contiguous())
    angle = torch.tensor([(-1 if back else 1) * position * f for f in frequency], dtype=torch.float64)
    return torch.cat([kept, torch.view_as_real(numbers * torch.polar(torch.ones_like(angle), angle)).flatten(-2)], -1)


def norm(module, x):
    return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def frequencies_by_formula(args, pooled):
    plain = [(args.compress_rope_theta if pooled else args.rope_theta) ** (-i / ROTATED) for i in range(0, ROTATED, 2)]
    if not pooled:
        return plain
    turns = [args.original_seq_len / (n * 2 * math.pi) for n in (args.beta_fast, args.beta_slow)]
    fast, slow = (ROTATED * math.log(t) / (2 * math.log(args.compress_rope_theta)) for t in turns)
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), ROTATED - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(ROTATED // 2)]
    return [f / args.rope_factor * r + f * (1 - r) for f, r in zip(plain, ramp)]


def entries_by_formula(compressor, x, frequency):
    """Entries of x [seq, hidden], one after the other."""
    ratio, width, results = compressor.ratio, compressor.width, []
    k, g = x @ compressor.wkv.weight.T, x @ compressor.wgate.weight.T
    for j in range(x.shape[0] // ratio):
        own = range(j * ratio, (j + 1) * ratio)
        if compressor.overlaps:
            before = range((j - 1) * ratio, j * ratio) if j else []
            pool = [(t, t % ratio, slice(0, width)) for t in before] + [(t, t % ratio, slice(width, None)) for t in own]
        else:
            pool = [(t, t % ratio, slice(None)) for t in own]
        values = torch.stack([k[t, part] for t, _, part in pool])
        gates = torch.stack([g[t, part] + compressor.ape[place, part] for t, place, part in pool])
        pooled = (values * gates.softmax(0)).sum(0)
        results.append(turned(norm(compressor.norm, pooled), j * ratio, frequency))
    return results


def scores_by_formula(indexer, x, latent, frequency):
    """[seq, entries] of one sequence."""
    entries = entries_by_formula(indexer.kv_compressor, x, frequency)
    rows = []
    for t in range(x.shape[0]):
        q = turned((indexer.wq_b.weight @ latent[t]).view(indexer.heads, indexer.width), t, frequency)
        w = (indexer.weights_proj.weight @ x[t]) * (indexer.heads * indexer.width) ** -0.5
        rows.append(torch.stack([(w * (q @ e).clamp(min=0)).sum() for e in entries]))
    return torch.stack(rows)


def attention_by_formula(args, attention, x):
    """(output, the indexer's loss) of x [seq, batch, hidden], token by token and head by head."""
    frequency = frequencies_by_formula(args, attention.ratio > 1)
    outs, losses = [], []
    for one in x.unbind(1):
        latent = norm(attention.q_layernorm, one @ attention.linear_q.weight.T)
        keys = norm(attention.kv_layernorm, one @ attention.linear_kv.weight.T)
        keys = [turned(key, t, frequency) for t, key in enumerate(keys)]
        entries = entries_by_formula(attention.compressor, one, frequency) if attention.compressor is not None else []
        scores = None
        if attention.indexer is not None:
            scores = scores_by_formula(attention.indexer, one.detach(), latent.detach(), frequency)
        rows = []
        for t in range(LENGTH):
            over = [j for j in range(len(entries)) if (j + 1) * attention.ratio <= t + 1]
            if scores is not None:
                over = sorted(over, key=lambda j: -scores[t, j].item())[: args.index_topk]
            q = (attention.linear_q_up_proj.weight @ latent[t]).view(HEADS, WIDTH)
            q = q / (q.square().mean(-1, keepdim=True) + attention.config.layernorm_epsilon).sqrt()
            q = turned(q, t, frequency)
            seen = torch.stack([*keys[max(0, t - WINDOW + 1) : t + 1], *(entries[j] for j in over)])
            heads = []
            for h in range(HEADS):
                exponents = (seen @ q[h] * WIDTH**-0.5).exp()
                weights = exponents / (exponents.sum() + attention.attn_sink[h].exp())
                heads.append(turned(weights @ seen, t, frequency, back=True))
            down = attention.linear_o_down_proj.weight.view(args.o_groups, args.o_lora_rank, -1)
            groups = [down[g] @ torch.cat(heads[g * 2 : g * 2 + 2]) for g in range(args.o_groups)]
            rows.append(attention.linear_o_up_proj.weight @ torch.cat(groups))
            if scores is not None and over:
                chosen = torch.stack([entries[j] for j in over]).detach()
                target = torch.stack([(chosen @ q[h].detach() * WIDTH**-0.5).softmax(0) for h in range(HEADS)]).sum(0)
                target = target / target.sum()
                losses.append((target * (target.log() - scores[t, over].log_softmax(0))).sum())
        outs.append(torch.stack(rows))
    loss = torch.stack(losses).sum() / (LENGTH * x.shape[1]) * args.indexer_loss_coeff if losses else None
    return torch.stack(outs, 1), loss


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


def streams_by_formula(connection, x):
    """(pre, post, matrix) of one token's streams [n, hidden], entry by entry."""
    n, settings = connection.settings.streams, connection.settings
    flat = x.flatten()
    v = connection.hc_fn.weight @ flat / (flat.square().mean() + connection.epsilon).sqrt()
    scale, base = connection.hc_scale, connection.hc_base
    pre = torch.sigmoid(v[:n] * scale[0] + base[:n]) + settings.stream_epsilon
    if len(scale) == 1:
        return pre, None, None
    post = 2 * torch.sigmoid(v[n : 2 * n] * scale[1] + base[n : 2 * n])
    rows = (v[2 * n :] * scale[2] + base[2 * n :]).view(n, n)
    matrix = rows.exp() / rows.exp().sum(1, keepdim=True) + settings.stream_epsilon
    for turn in range(2 * settings.iterations - 1):
        matrix = matrix / (matrix.sum(turn % 2, keepdim=True) + settings.stream_epsilon)
    return pre, post, matrix


def around_by_formula(connection, x, sublayer):
    """Streams [seq, batch, n, hidden] around a sublayer."""
    tokens = [[streams_by_formula(connection, token) for token in row] for row in x]
    inputs = torch.stack([torch.stack([p[0] @ t for p, t in zip(ps, row)]) for ps, row in zip(tokens, x)])
    made = sublayer(inputs)
    rows = []
    for ps, row, new in zip(tokens, x, made):
        rows.append(torch.stack([p[1][:, None] * f + p[2].T @ t for p, t, f in zip(ps, row, new)]))
    return torch.stack(rows)


def gated(mlp, x, limit=math.inf):
    gate, up = functional.linear(x, mlp.linear_fc1.weight).chunk(2, -1)
    hidden = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return functional.linear(hidden, mlp.linear_fc2.weight)


def experts_by_formula(layer, x, tokens=None):
    """What a layer of experts makes of x [seq, batch, hidden], token by token; and where tokens go."""
    router, rows, counts = layer.router, [], torch.zeros(EXPERTS)
    for place, token in enumerate(x.flatten(0, 1)):
        p = (1 + (router.weight @ token).exp()).log().sqrt()
        if tokens is None:
            chosen = (p.detach() + router.expert_bias).topk(K).indices.tolist()
        else:
            chosen = router.tid2eid[tokens.flatten()[place]].tolist()
        total = gated(layer.shared_experts, token)
        for i in chosen:
            total = total + 1.5 * p[i] / p[chosen].sum() * gated(layer.experts.local_experts[i], token)
            counts[i] += 1
        rows.append(total)
    return torch.stack(rows).view(x.shape), counts


def assert_same_gradients(found, expected, leaves, **tolerance):
    towards = torch.randn_like(found)
    pairs = zip(
        torch.autograd.grad((found * towards).sum(), leaves, allow_unused=True),
        torch.autograd.grad((expected * towards).sum(), leaves, allow_unused=True),
    )
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **tolerance)


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


def logits_by_formula(model, ids, output):
    """Logits [seq, batch, vocabulary] of streams behind the last layer, and what multi-token prediction gets."""
    one = torch.stack([torch.stack([streams_by_formula(model.hc_head, t)[0] @ t for t in row]) for row in output])
    return norm(model.final_layernorm, one) @ model.output_layer.weight.T, one


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
