"""A small DeepSeek-V4 of Megatron's layers, and what its parts compute by the formulas of the paper, token by token."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from mindspeed_fx.megatron.deepseek4 import layer as layer_specs
from mindspeed_fx.megatron.deepseek4.settings import settings_of
from mindspeed_fx.megatron.model_parts import add_parts
from tests.megatron.flags.deepseek4_runs import DEEPSEEK4, LENGTH, WINDOW
from tests.megatron.flags.values import apply

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


def logits_by_formula(model, ids, output):
    """Logits [seq, batch, vocabulary] of streams behind the last layer, and what multi-token prediction gets."""
    one = torch.stack([torch.stack([streams_by_formula(model.hc_head, t)[0] @ t for t in row]) for row in output])
    return norm(model.final_layernorm, one) @ model.output_layer.weight.T, one
