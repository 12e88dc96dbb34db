"""DeepSeek-V3.2's sparse attention by MindSpeed-LLM's flags: choice, attention and loss by formula, in one graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from mindspeed_fx.megatron import index_sharing
from mindspeed_fx.megatron.model_parts import add_parts
from tests.megatron.flags.model_effects import SPARSE_MODEL
from tests.megatron.flags.values import apply

pytestmark = pytest.mark.usefixtures("on_one_rank")


@pytest.fixture(autouse=True)
def no_losses_of_earlier_tests():
    """Megatron adds up what it logs, whoever ran before."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    DSAIndexerLossLoggingHelper.tracker.clear()


TOPK, WIDTH, HEADS, LENGTH = 5, 12, 3, 16
DSA = (
    f"--enable-dsa-indexer {SPARSE_MODEL} --index-n-heads {HEADS} --index-head-dim {WIDTH} --index-topk {TOPK} "
    "--indexer-loss-coeff 0.7"
)


def build(words: str, **config):
    """A GPTModel in float64 with latent attention and an indexer, and the arguments."""
    from tests.megatron.gpt_models import tiny_gpt

    args = apply(f"{DSA} {words}")
    torch.manual_seed(0)
    model = tiny_gpt(latent=True, init_method_std=0.4, **config)
    add_parts(model, args)
    model.double()
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if "norm" in name):
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return args, model


def rotate(x, pairs_neighbours: bool, base: float = 10000.0):
    """x [seq, batch, (heads,) 8] by its position, the channels of a pair written one by one."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        one, other = (2 * i, 2 * i + 1) if pairs_neighbours else (i, i + half)
        angles = torch.arange(len(x), dtype=torch.float32) * (
            1.0 / base ** (torch.tensor(2 * i, dtype=torch.float32) / (2 * half))
        )
        angles = angles.double().view(-1, *[1] * (x.dim() - 2))
        out[..., one] = x[..., one] * angles.cos() - x[..., other] * angles.sin()
        out[..., other] = x[..., other] * angles.cos() + x[..., one] * angles.sin()
    return out


def scores_by_formula(indexer, x, latent, pairs_neighbours):
    """[batch, seq, seq] float64: token s (second) for token t (third), minus infinity for later ones."""
    q = (latent @ indexer.wq_b.weight.T).unflatten(-1, (HEADS, WIDTH))
    k = functional.layer_norm(x @ indexer.wk.weight.T, (WIDTH,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6)
    q = torch.cat([rotate(q[..., :8], pairs_neighbours), q[..., 8:]], -1)
    k = torch.cat([rotate(k[..., :8], pairs_neighbours), k[..., 8:]], -1)
    w = x @ indexer.weights_proj.weight.T / math.sqrt(HEADS) / math.sqrt(WIDTH)
    rows = []
    for s in range(len(x)):
        products = torch.einsum("bhd,tbd->bht", q[s], k).clamp(min=0)
        row = (products * w[s].unsqueeze(-1)).sum(1)
        rows.append(torch.where(torch.arange(len(x)) <= s, row, -math.inf))
    return torch.stack(rows, 1)


def attention_by_formula(core, q, k, v, indices):
    """(what a token gets [seq, batch, heads * width], weights added up over heads [batch, seq, seq])."""
    length, batch = q.shape[:2]
    seen = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        for s in range(length):
            for t in indices[b, s].tolist():
                seen[b, s, t] = t <= s
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * core.softmax_scale
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2), weights.sum(1)


def loss_by_formula(scores, weights, indices, coefficient):
    """KL of attention to the indexer over the chosen tokens, the mean over all tokens, with 1e-8 added to both."""
    total = 0.0
    for b in range(scores.shape[0]):
        for s in range(scores.shape[1]):
            chosen = [t for t in indices[b, s].tolist() if t <= s]
            likely = scores[b, s, chosen].softmax(0) + 1e-8
            wanted = weights[b, s, chosen]
            wanted = wanted / wanted.sum() + 1e-8
            total = total + (wanted.detach() * (wanted.detach() / likely).log()).sum()
    return total / (scores.shape[0] * scores.shape[1]) * coefficient


@pytest.mark.parametrize("words", ["", "--apply-rope-no-in-complex"])
def test_a_layer_by_formula(words):
    args, model = build(words)
    core = model.decoder.layers[0].self_attention.core_attention
    torch.manual_seed(1)
    heads = model.config.num_attention_heads
    q, k, v = (torch.randn(LENGTH, 2, heads, w, dtype=torch.float64, requires_grad=True) for w in (16, 16, 8))
    x, latent = torch.randn(LENGTH, 2, 32, dtype=torch.float64), torch.randn(LENGTH, 2, 24, dtype=torch.float64)
    shared = index_sharing.Shared(None)
    out, indices = core(q, k, v, shared, x, latent), shared.indices
    scores = scores_by_formula(core.indexer, x, latent, args.apply_rope_no_in_complex)
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True)
    least = scores.masked_fill(~is_chosen, math.inf).amin(-1)
    assert (scores.masked_fill(is_chosen, -math.inf).amax(-1) <= least.clamp(min=-1e9) + 1e-9)[:, TOPK:].all()
    assert (is_chosen & (scores > -math.inf)).sum(-1)[0].tolist() == [min(s + 1, TOPK) for s in range(LENGTH)]
    expected, weights = attention_by_formula(core, q, k, v, indices)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    loss = loss_by_formula(scores, weights, indices, 0.7)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.25))
    towards = torch.randn_like(out)
    leaves = [q, k, v, *core.indexer.parameters()]
    found = torch.autograd.grad((out * towards).sum(), leaves)
    right = torch.autograd.grad((expected * towards).sum() + 0.25 * loss, leaves)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    for one, other in zip(found, right):
        assert other.abs().max() > 1e-6
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # cosines are float32
    assert DSAIndexerLossLoggingHelper.tracker["values"][0] == pytest.approx(loss.item(), rel=1e-5)
    DSAIndexerLossLoggingHelper.tracker.clear()


def test_what_is_not_chosen_has_no_weight():
    """With as many tokens as there are, the model is that without an indexer."""
    from tests.megatron.gpt_models import batch, tiny_gpt

    _, model = build("--index-topk 64")
    torch.manual_seed(0)
    plain = tiny_gpt(latent=True, init_method_std=0.4).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "core_attention" not in k})
    inputs = {**batch(), "labels": None}
    torch.testing.assert_close(model(**inputs), plain(**inputs), rtol=1e-9, atol=1e-9)
    _, sparse = build("")
    sparse.load_state_dict(model.state_dict())
    assert (sparse(**inputs) - model(**inputs)).abs().max() > 1e-3


RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize(
    "words, config", [("", {}), ("--index-topk-pattern CS", {}), ("--index-topk-pattern CS", RECOMPUTED)]
)
def test_one_graph(words, config):
    """Compiled as eager, with gradients; recomputed as not; the second layer sees what the first has chosen."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    from tests.megatron.gpt_models import batch, train

    _, model = build(words, **config)
    _, plain = build(words)
    indices, logged = [], []
    for layer in plain.decoder.layers:
        attend = layer.self_attention.core_attention
        attend.register_forward_pre_hook(lambda m, args: indices.append(getattr(args[3], "indices", None)))
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    results = []
    for which, call in ((plain, None), (model, compiled), (model, None)):
        DSAIndexerLossLoggingHelper.tracker["values"].zero_()
        results.append(train(which, batch(), call))
        logged.append(DSAIndexerLossLoggingHelper.tracker["values"].clone())
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        for name, gradient in results[0][1].items():
            torch.testing.assert_close(grads[name], gradient, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logged[1], logged[0])
    torch.testing.assert_close(logged[2], logged[0])
    indexers = [name for name, _ in model.named_parameters() if "indexer.wk" in name]
    assert len(indexers) == (1 if words else 2)
    assert (logged[0] > 0).tolist() == [True, not words]
    if words:
        assert indices[0] is None and indices[1].shape == (2, LENGTH, TOPK)
    DSAIndexerLossLoggingHelper.tracker.clear()


FUSED = "--use-fused-lightning-indexer --use-sparse-flash-attn"
OPERATORS = [FUSED, "--enable-mla-absorb", f"{FUSED} --enable-mla-absorb --index-topk-pattern CS"]


@pytest.mark.parametrize("way", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", OPERATORS)
def test_operators_are_the_mask(words, way):
    """Loss, gradients and the indexers' logged losses, in float64, the model's own loss in float32 but unfused, so that
    it is rounded alike; in a graph the operators are called.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    import mindspeed_fx
    from tests.megatron.gpt_models import batch, train

    _, plain = build("--index-topk-pattern CS" if "CS" in words else "")
    _, model = build(words)
    model.load_state_dict(plain.state_dict())
    call, logged, results = None, [], []
    if way == "graph":
        call = torch.compile(
            model,
            backend="mindspeed",
            options={"codegen": "eager", "disable": ["fusion.*cross_entropy"]},
            fullgraph=True,
        )
    for which, run in ((plain, None), (model, call)):
        DSAIndexerLossLoggingHelper.tracker["values"].zero_()
        results.append(train(which, batch(), run))
        logged.append(DSAIndexerLossLoggingHelper.tracker["values"].clone())
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-9, atol=1e-9)
    for name, gradient in results[0][1].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(logged[1], logged[0], rtol=1e-5, atol=1e-7)
    if way == "graph":
        (graph,) = mindspeed_fx.explain(model, options={"codegen": "eager"}, **batch()).graphs
        assert "mindspeed.sparse_attention" in graph.stages["forward"]
    DSAIndexerLossLoggingHelper.tracker.clear()


def test_which_layers_choose():
    args = apply(f"{DSA} --index-topk-freq 4 --index-skip-topk-offset 3")
    assert index_sharing.sources(args, 12) == [1, 2, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11]
    args.index_topk_pattern = "CFSSC"
    assert index_sharing.sources(args, 5) == [1, 2, 2, 2, 5]
    for pattern in ("SCCCC", "CCC", "CXCCC"):
        args.index_topk_pattern = pattern
        with pytest.raises(ValueError, match="--index-topk-pattern .* expected 5 letters"):
            index_sharing.sources(args, 5)


def test_a_choice_on_another_stage_is_refused():
    args, model = build("")
    args.index_topk_pattern = "CS"
    model.decoder.layers = model.decoder.layers[1:]
    with pytest.raises(ValueError, match="layer 2 sees what layer 1 has chosen"):
        add_parts(model, args)


def test_norms_have_float32_weights():
    """In a bfloat16 model: weights of norms in float32 through Megatron's conversion, buffers, optimizer and a step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from mindspeed_fx.megatron import wide_norms
    from tests.megatron.gpt_models import batch, tiny_gpt

    torch.manual_seed(0)
    model = tiny_gpt(bf16=True, params_dtype=torch.bfloat16).bfloat16()
    wide_norms.widen(model)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {n for n in kinds if "norm" in n}
    x = torch.randn(4, 32).bfloat16()
    norm = model.decoder.final_layernorm
    with torch.no_grad():
        norm.weight.copy_(torch.rand(32) + 0.5)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    assert norm(x).dtype == torch.bfloat16 and torch.equal(norm(x), wide.bfloat16())
    config = OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0
    )
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    losses = [call(**batch()).float().mean() for call in (compiled, model)]
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=0)
    losses[0].backward()
    ddp.finish_grad_sync()
    is_done, norm_of_gradients, _ = optimizer.step()
    assert is_done and norm_of_gradients > 0
    for name, p in model.named_parameters():
        assert p.dtype == kinds[name]
        if p.dtype == torch.float32:  # a step of 1e-4 is less than bfloat16 tells apart at one
            assert 5e-5 < (p - before[name]).abs().max() < 2e-4
