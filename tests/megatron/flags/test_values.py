"""What flags hand to Megatron computes what MindSpeed computes: formulas written out here against Megatron-core."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional

import mindspeed_fx
from mindspeed_fx.megatron import flags
from mindspeed_fx.megatron.flags.config import config_fields
from tests.megatron.flags.layer_effects import MLA
from tests.megatron.flags.values import apply, build_with_parts, config_of, logits_by_formula
from tests.megatron.flags.words import parse

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
pytestmark = pytest.mark.usefixtures("on_one_rank")


def yarn_by_formula(dim, base, scale, length, fast, slow, positions, mscale, mscale_all):
    """Cosines of YaRN (Peng et al. 2023) as DeepSeek has it: positions x dim/2."""

    def bound(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(bound(fast)), 0), min(math.ceil(bound(slow)), dim - 1)
    ramp = ((torch.arange(dim // 2).double() - low) / (high - low)).clamp(0, 1)
    plain = base ** (-torch.arange(0, dim, 2).double() / dim)
    frequencies = plain / scale * ramp + plain * (1 - ramp)
    factor = (0.1 * mscale * math.log(scale) + 1) / (0.1 * mscale_all * math.log(scale) + 1)
    return (torch.arange(positions).double()[:, None] * frequencies).cos() * factor


def test_yarn():
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, _yarn_get_mscale

    args = apply(
        f"{MLA} --rope-scaling-type yarn --rope-scaling-factor 40 --rope-scaling-original-max-position-embeddings 4096 "
        "--rope-scaling-mscale 1.3 --rope-scaling-mscale-all-dim 0.7 --beta-fast 30 --beta-slow 2"
    )
    config = config_of(args)
    assert config.rope_type == "yarn"
    embedding = YarnRotaryEmbedding(
        config.qk_pos_emb_head_dim,
        rotary_base=config.rotary_base,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        use_cpu_initialization=True,
    )
    angles, factor = embedding.get_emb(64)
    expected = yarn_by_formula(64, 10000, 40, 4096, 30, 2, 64, 1.3, 0.7)
    torch.testing.assert_close((angles[:, 0, 0, :32].cos() * factor).double(), expected, rtol=1e-4, atol=1e-4)
    scale = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim) ** 2
    assert scale == pytest.approx((0.07 * math.log(40) + 1) ** 2)


def test_plain_rotation_of_latent_attention():
    """MindSpeed-LLM's scripts without --rope-scaling-type rotate plainly; a script of Megatron's own keeps YaRN."""
    assert config_of(apply(f"{MLA} --mla-fa-without-pad")).rope_type == "rope"
    assert config_of(apply(MLA)).rope_type == "yarn"


def test_partial_and_dynamic_rotation():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    args = apply("--partial-rotary-factor 0.25 --dynamic-factor 2 --seq-length 64 --kv-channels 16")
    embedding = RotaryEmbedding(16, args.rotary_percent, rotary_base=args.rotary_base, use_cpu_initialization=True)
    base = 10000 * (2 * 64 / 32 - 1) ** (16 / 14)
    torch.testing.assert_close(embedding.inv_freq, base ** (-torch.arange(0, 4, 2).float() / 4))


def megatron_route(args, logits):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return topk_routing_with_score_function(
        logits,
        args.moe_router_topk,
        use_pre_softmax=args.moe_router_pre_softmax,
        num_groups=args.moe_router_num_groups,
        group_topk=args.moe_router_group_topk,
        scaling_factor=args.moe_router_topk_scaling_factor,
        score_function=args.moe_router_score_function,
    )


def route_by_formula(logits, k, normalize, scale, scores=None):
    """The k largest scores of a softmax over all experts, divided by their sum or not, times a scale."""
    scores = logits.softmax(-1) if scores is None else scores
    chosen = torch.zeros_like(logits).scatter(1, scores.topk(k, dim=1).indices, 1)
    weights = scores * chosen
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    return weights * scale, chosen.bool()


KIND = "--moe-router-load-balancing-type"
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 1"
ROUTES = {
    f"{KIND} softmax_topk --moe-router-topk 3": (False, 1),
    f"{KIND} softmax_topk --moe-router-topk 3 --norm-topk-prob": (True, 1),
    f"{KIND} softmax_topk --moe-router-topk 3 --moe-router-topk-scaling-factor 2.5 {GROUPS}": (False, 2.5),
    f"{KIND} pai_megatron_aux_loss --moe-router-topk 3 --moe-router-topk-scaling-factor 2.5 {GROUPS}": (False, 1),
    f"{KIND} aux_loss --moe-router-topk 3 --norm-topk-prob --moe-router-pre-softmax": (True, 1),
    f"{KIND} aux_loss --moe-router-topk 3 --norm-topk-prob --moe-router-topk-scaling-factor 2.5": (True, 1),
}


@pytest.mark.parametrize("words", list(ROUTES))
def test_routers(words):
    normalize, scale = ROUTES[words]
    logits = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 8, dtype=torch.float64)
    probs, chosen = megatron_route(apply(words), logits)
    expected, expected_chosen = route_by_formula(logits, 3, normalize, scale)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-6)  # Megatron's softmax is float32
    assert torch.equal(chosen, expected_chosen)
    (gradient,) = torch.autograd.grad((probs * weight).sum(), logits)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), logits)
    assert gradient.abs().max() > 0
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_sigmoid_weights_with_norm_topk_prob():
    args = apply(
        f"{KIND} aux_loss --moe-router-topk 3 --norm-topk-prob --moe-router-score-function sigmoid "
        "--moe-router-topk-scaling-factor 2.5"
    )
    logits = torch.randn(16, 8)
    expected, _ = route_by_formula(logits, 3, True, 1, logits.sigmoid())
    torch.testing.assert_close(megatron_route(args, logits)[0], expected)


def test_which_layers_have_experts():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    args = apply("--first-k-dense-replace 2 --num-experts 4 --n-shared-experts 2 --moe-ffn-hidden-size 24")
    config = config_of(args)
    config.normalization = "RMSNorm"
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False).layer_specs
    names = [layer.submodules.mlp.module.__name__ for layer in layers]
    assert names == ["MLP", "MLP", "MoELayer", "MoELayer"]
    assert config.moe_shared_expert_intermediate_size == 2 * 24


def test_layers_without_no_ops_stay_in_their_stages():
    """8 layers on 2 ranks of 2 stages, of which 0 and 7 do nothing: each stage keeps its others, in their order."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    args = apply(
        "--noop-layers 0,7 --num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--init-method-std 0.05"
    )
    layout = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, 2)
    layout.validate_layer_layout(args.num_layers, None)
    counts = [[sum(kind.name == "decoder" for kind in stage) for stage in rank] for rank in layout.layout]
    assert counts == [[1, 2], [2, 1]]  # rank, virtual stage: layers 1 | 4, 5 and 2, 3 | 6
    weights = torch.empty(400, 400)
    config_fields(args)["output_layer_init_method"](weights)
    assert weights.std().item() == pytest.approx(0.05 / math.sqrt(2 * 8), rel=0.02)


def test_a_gate_of_gelu():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    for words, approximate in (("--geglu", "none"), ("--gelu-tanh --swiglu", "tanh")):
        config = config_of(apply(f"{words} --ffn-hidden-size 96"))
        mlp = MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
        x = torch.randn(3, 2, 64, requires_grad=True)
        gate, up = functional.linear(x, mlp.linear_fc1.weight).chunk(2, -1)
        expected = functional.linear(functional.gelu(gate, approximate=approximate) * up, mlp.linear_fc2.weight)
        torch.testing.assert_close(mlp(x)[0], expected)


def test_the_scale_of_scores():
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = config_of(apply("--query-pre-attn-scalar 144"))
    config.masked_softmax_fusion = False
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=config.softmax_scale)
    assert attention.softmax_scale == pytest.approx(1 / 12)


GEMMA2 = (
    "--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec --post-norm --normalization RMSNorm "
    "--add-rmsnorm-offset --interleave-sliding-window 5 --input-embeds-norm --output-logit-softcapping 2 "
    "--hidden-size 32"
)
SCALES = (
    "--scale-emb 3 --embedding-multiplier-scale 0.5 --scale-depth 1.4 --dim-model-base 8 --output-multiplier-scale 2 "
    "--num-layers 2 --hidden-size 32"
)
CAPS = "--attn-logit-softcapping 0.3 --output-logit-softcapping 0.2 --output-multiplier-scale 2 --hidden-size 32"


def assert_formula(words: str) -> None:
    from tests.megatron.gpt_models import batch

    args, model = build_with_parts(words)
    inputs = {**batch(), "labels": None}
    torch.testing.assert_close(model(**inputs), logits_by_formula(model, args, inputs["input_ids"]))


@pytest.mark.parametrize("words", [SCALES, CAPS, f"{SCALES} {CAPS}"], ids=["scales", "caps", "both"])
def test_scales_and_caps(words):
    assert_formula(words)


def test_layers_of_gemma2():
    assert_formula(GEMMA2)


def test_norms_over_all_heads():
    """As MinimaxAttention: queries [s, b, heads x width] and keys [s, b, groups x width] are normalized whole."""
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import batch, tiny_gpt

    args = apply("--spec mindspeed_llm.tasks.models.spec.minimax_spec layer_spec --qk-layernorm")
    model = tiny_gpt(qk_layernorm=True, layers=1)
    add_parts(model, args)
    attention = model.decoder.layers[0].self_attention
    with torch.no_grad():
        for norm in (attention.q_layernorm, attention.k_layernorm):
            norm.weight.copy_(torch.rand_like(norm.weight))
    x = torch.randn(5, 2, 32)
    mixed = functional.linear(x, attention.linear_qkv.weight).unflatten(-1, (2, 4 * 8))
    q, k, v = mixed.split([16, 8, 8], -1)
    expected = [
        functional.rms_norm(t.flatten(-2), (width,), norm.weight, 1e-5).view(5, 2, -1, 8)
        for t, width, norm in ((q, 32, attention.q_layernorm), (k, 16, attention.k_layernorm))
    ]
    for have, want in zip(attention.get_query_key_value_tensors(x, None), [*expected, v]):
        torch.testing.assert_close(have, want)
    inputs = batch()
    loss = model(**inputs).mean()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).mean(), loss)


def test_norms_with_an_offset_start_at_one_as_in_mindspeed_llm():
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import tiny_gpt

    model = tiny_gpt(layernorm_zero_centered_gamma=True)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert len(norms) == 5 and not any(p.any() for p in norms)
    add_parts(model, apply("--add-rmsnorm-offset --normalization RMSNorm"))
    assert all(torch.equal(p, torch.ones_like(p)) for p in norms)


@pytest.mark.parametrize("words", [CAPS, GEMMA2], ids=["caps", "gemma2"])
def test_models_with_parts_are_compiled_whole(words):
    """One graph, every kind of site fused, the loss and every gradient as eager."""
    from tests.megatron.gpt_models import batch, train

    args, model = build_with_parts(words)
    inputs = batch()
    expected, gradients = train(model, inputs)
    report = mindspeed_fx.explain(model, **inputs, options={"codegen": "eager"})
    assert len(report.graphs) == 1
    counts = report.graphs[0].counts
    fused = ("fusion.attention", "fusion.rope", "fusion.swiglu", "fusion.cross_entropy")
    assert [counts.get(name, 0) for name in fused] == [2, 4, 2, 1]
    assert counts["fusion.rms_norm"] + counts["fusion.add_rms_norm"] == 9 + 4 * (words is GEMMA2)
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    loss, own = train(model, inputs, compiled)
    torch.testing.assert_close(loss, expected)
    assert own.keys() == gradients.keys() and all(g.abs().sum() > 0 for g in own.values())
    torch.testing.assert_close(own, gradients)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_experts_go_to_main_grad(compiled):
    """Two micro-batches in bfloat16: the float32 sum of float32 products, which no rounding to bfloat16 gives."""
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import batch, tiny_gpt

    model = tiny_gpt(experts=4, layers=1, params_dtype=torch.bfloat16, bf16=True).bfloat16()
    add_parts(model, apply("--gemm-gradient-accumulation-fusion --num-experts 4 --moe-grouped-gemm"))
    experts = dict(model.decoder.layers[0].mlp.experts.named_parameters())
    products = dict.fromkeys(experts, 0)

    def record(name, linear):
        def add(module, inputs, output):
            x = inputs[0].detach().float()
            output[0].register_hook(lambda g: products.update({name: products[name] + g.float().T @ x}))

        return linear.register_forward_hook(add)

    layers = model.decoder.layers[0].mlp.experts.named_modules()
    hooks = [record(f"{name}.weight", m) for name, m in layers if name.endswith(("fc1", "fc2"))]
    for weight in experts.values():
        weight.main_grad = torch.ones(weight.shape)
    for _ in range(2):
        model(**batch()).mean().backward()
    if compiled:
        for hook in hooks:
            hook.remove()
        for weight in experts.values():
            weight.main_grad = torch.ones(weight.shape)
        run = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
        for _ in range(2):
            run(**batch()).mean().backward()
    for name, weight in experts.items():
        assert weight.grad is None or not weight.grad.any()
        added = weight.main_grad - 1
        assert added.any() and (added.bfloat16().float() != added).any()
        torch.testing.assert_close(added, products[name], rtol=0.03 * compiled or 1e-5, atol=2e-4 * compiled or 1e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_moments_in_bfloat16(sharded):
    """AdamW in float32 whose moments are rounded after each step; two bytes a moment; a checkpoint goes on bitwise."""
    from mindspeed_fx.megatron.optimizer import MOMENTS
    from mindspeed_fx.megatron.training.optimizer_memory import narrow_moments
    from tests.megatron.optimizers import bits, build, train

    def narrow(optimizer):
        narrow_moments(optimizer)
        return optimizer

    model, optimizer = build(sharded, narrow)
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    parameters = [p for group in inner.param_groups for p in group["params"]]
    exact = {p: [torch.zeros_like(p), torch.zeros_like(p), p.detach().clone()] for p in parameters}
    plain_step = inner.step

    def step():
        plain_step()
        for group in inner.param_groups:
            (b1, b2), lr, t = group["betas"], group["lr"], group["step"]
            for p in group["params"]:
                m, v, w = exact[p]
                m, v = m.lerp(p.grad, 1 - b1), v * b2 + p.grad**2 * (1 - b2)
                rate = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                w = w * (1 - lr * group["weight_decay"]) - lr * rate
                exact[p] = [m.bfloat16().float(), v.bfloat16().float(), w]

    inner.step = step
    train(model, optimizer)
    for p in parameters:
        assert [inner.state[p][name].dtype for name in MOMENTS] == [torch.bfloat16] * 2
        torch.testing.assert_close(p.detach(), exact[p][2], rtol=1e-5, atol=1e-6)
    inner.step = plain_step
    saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    expected = train(model, optimizer, first=3)
    if not sharded:  # whose moments a checkpoint holds apart
        again, other = build(sharded, narrow)
        again.load_state_dict(weights)
        other.load_state_dict(saved)
        assert train(again, other, first=3) == expected
        assert all(torch.equal(a, b) for a, b in zip(bits(again), bits(model)))


@pytest.mark.parametrize("sharded", [False, True])
def test_moments_in_bfloat16_wait_where_other_flags_say(sharded):
    """--reuse-fp32-param and --swap-optimizer change no bit of a run with --o2-optimizer."""
    from mindspeed_fx.megatron import host_states, residual
    from mindspeed_fx.megatron.training.optimizer_memory import narrow_moments
    from tests.megatron.optimizers import bits, build, train

    results = []
    for change in (lambda o: o, residual.reuse_weights, lambda o: host_states.swap_states(o, 3)):

        def narrow(optimizer, change=change):
            narrow_moments(optimizer)
            return change(optimizer)

        model, optimizer = build(sharded, narrow)
        results.append((train(model, optimizer), bits(model)))
    for losses, weights in results[1:]:
        assert losses == results[0][0] and all(torch.equal(a, b) for a, b in zip(weights, results[0][1]))


def test_gradients_in_bfloat16_are_not_fused():
    args = parse(["--o2-gradient", "--bf16"])
    args.gradient_accumulation_fusion = True
    with pytest.raises(flags.FlagError, match="give --no-gradient-accumulation-fusion"):
        flags.apply(args, ["--o2-gradient", "--bf16"])


def test_tokens_go_to_experts_in_turn():
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import batch, tiny_gpt

    args = apply("--fix-router --num-experts 4 --expert-model-parallel-size 1")
    model = tiny_gpt(experts=4, layers=1)
    routed = []
    router = model.decoder.layers[0].mlp.router
    router.register_forward_hook(lambda module, inputs, output: routed.append(output))
    add_parts(model, args)
    router.register_forward_hook(lambda module, inputs, output: routed.append(output))
    model(**batch()).mean().backward()
    (before, _), (weights, chosen) = routed
    tokens = torch.arange(32)[:, None]
    expected = torch.zeros(32, 4, dtype=torch.bool).scatter(1, (2 * tokens + torch.arange(2)) % 4, True)
    assert torch.equal(chosen, expected) and torch.equal(weights != 0, expected)
    largest = before.topk(2, dim=1).values
    torch.testing.assert_close(weights[0, :2], largest[0])
    torch.testing.assert_close(weights[1, 2:], largest[1])
    assert router.weight.grad.abs().sum() > 0


def test_documents_of_one_length():
    from mindspeed_fx.megatron.training.fixed_documents import mask_of_documents

    mask = mask_of_documents(7, 3)
    assert mask.shape == (1, 7, 7)
    seen = [[j for j in range(7) if not mask[0, i, j]] for i in range(7)]
    assert seen == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6]]


def test_rotation_of_glm():
    """Neighbours (x_2i, x_2i+1) of the first half of a head turn by position times base^(-2i/d)."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    config = config_of(apply("--use-glm-rope"))
    assert config.rotary_interleaved
    rope = RotaryEmbedding(16, rotary_percent=0.5, rotary_interleaved=True, use_cpu_initialization=True)
    x = torch.randn(5, 2, 3, 16)
    out = apply_rotary_pos_emb(x, rope(5), config)
    turns = torch.polar(torch.ones(5, 4), torch.arange(5)[:, None] * 10000 ** -(torch.arange(0, 8, 2) / 8))
    expected = torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2))) * turns[:, None, None]
    torch.testing.assert_close(out[..., :8], torch.view_as_real(expected).flatten(-2))
    assert torch.equal(out[..., 8:], x[..., 8:])


def test_a_window():
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import batch, tiny_gpt

    args = apply("--sliding-window 4 --seq-length 16")
    model = tiny_gpt(window_size=args.window_size, window_attn_skip_freq=args.window_attn_skip_freq, layers=1)
    add_parts(model, args)
    ids = batch()["input_ids"]
    first, second = ids.clone(), ids.clone()
    second[:, 0] += 1
    logits = [model(**{**batch(), "input_ids": ids % 64, "labels": None}) for ids in (first, second)]
    changed = (logits[0] != logits[1]).any(-1).all(0)
    assert changed.tolist() == [True] * 5 + [False] * 11


def test_a_bias_of_experts_that_softmax_scores_do_not_read_is_dropped():
    """As Megatron alone would refuse the configuration, and MindSpeed-LLM ignores the bias."""
    words = "--num-experts 4 --moe-router-enable-expert-bias --first-k-dense-replace 1"
    assert not apply(words).moe_router_enable_expert_bias
    assert apply(f"{words} --moe-router-score-function sigmoid").moe_router_enable_expert_bias
    assert apply("--num-experts 4 --moe-router-enable-expert-bias").moe_router_enable_expert_bias


def test_no_flag_of_mindspeed_becomes_a_field_of_the_configuration_by_chance():
    """core_transformer_config_from_args takes every argument with a field's name: ours hold its default."""
    import dataclasses

    from megatron.core.transformer.transformer_config import MLATransformerConfig

    defaults = {f.name: f.default for f in dataclasses.fields(MLATransformerConfig)}
    strays = {
        flag.name: (flag.default, defaults[flag.attribute])
        for flag in flags.TABLE
        if flag not in flags.SUBJECTS["In Megatron too"]
        and flag.value is None
        and flag.attribute in defaults
        and flag.default != defaults[flag.attribute]
    }
    assert not strays
