"""Routers of mixtures of experts, as models spell them, become one operator on npu."""

import inspect
import math

import pytest
import torch

import mindspeed_fx
from tests.kernels.npu import npu_graphs
from tests.models import explain, function_agrees, fusion_counts
from tests.transformers_parts import need_whole_experts, part_of
from tests.zoo import architectures

NAME = "fusion.router_topk"


def dense(weights, ids, experts):
    """[tokens, experts]: the order of the chosen, which ``sorted=False`` leaves open, is not seen."""
    return torch.zeros(*weights.shape[:-1], experts, dtype=weights.dtype).scatter(-1, ids, weights)


def softmax_router(x, k=2, eps=None, normalize=True, dtype=torch.float64, scale=None, late_cast=False):
    """Mixtral, Qwen3-MoE, Qwen3-Next, DeepSeek-V2 without groups."""
    probs = x.to(dtype).softmax(-1) if late_cast else x.softmax(-1, dtype=dtype)
    weights, ids = probs.topk(k, -1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps if eps else weights.sum(-1, keepdim=True))
    return dense(weights if scale is None else weights * scale, ids, x.shape[-1])


def grouped_router(
    x, bias, k=3, groups=4, kept=2, best=2, fill=-math.inf, score="sigmoid", spelling="huggingface", scored=None
):
    """DeepSeek-V3, GLM-4.5; torchtitan's form; DeepSeek-V2's groups."""
    scores = x.sigmoid() if score == "sigmoid" else x.softmax(-1)
    choice = scores if bias is None else scores + bias
    if spelling == "published":  # the tokens are [batch * sequence] already, and are so once more
        spelling, choice = "huggingface", scores.view(-1, x.shape[-1])
        choice = choice if bias is None else choice + bias.unsqueeze(0)
    grouped = (choice if scored is None else scored(choice)).view(x.shape[0], groups, -1)
    of_groups = grouped.topk(2, dim=-1)[0].sum(-1) if best == 2 else grouped.max(-1).values
    group_ids = of_groups.topk(kept, dim=-1, sorted=False)[1]
    if spelling == "huggingface":
        mask = torch.zeros_like(of_groups).scatter_(1, group_ids, 1).unsqueeze(-1)
        mask = mask.expand(-1, groups, x.shape[-1] // groups).reshape(-1, x.shape[-1])
        choice = choice.masked_fill(~mask.bool(), fill)
    elif spelling == "torchtitan":
        mask = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, group_ids, False)
        choice = grouped.masked_fill(mask.unsqueeze(-1), fill).view(x.shape)
    elif spelling == "where":
        mask = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, group_ids, True)
        choice = torch.where(mask.unsqueeze(-1), grouped, fill).flatten(1)
    else:  # experts of a group alternate with those of others
        mask = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, group_ids, True).unsqueeze(1)
        mask = mask.expand(-1, x.shape[-1] // groups, groups).reshape(x.shape)
        choice = choice.masked_fill(~mask, fill)
    ids = choice.topk(k, -1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return dense(weights * 2.5, ids, x.shape[-1])


def softmax_of_chosen(x, dtype=None):
    """GPT-OSS."""
    values, ids = x.topk(2, -1)
    return dense(values.softmax(-1, dtype=dtype), ids, x.shape[-1])


def logits(dtype=torch.float64, experts=12):
    torch.manual_seed(0)
    return torch.randn(9, experts).to(dtype).requires_grad_()


def bias():
    return torch.linspace(-0.3, 0.3, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]


SPELLINGS = {
    "mixtral": lambda x, b: softmax_router(x),
    "widened before": lambda x, b: softmax_router(x, late_cast=True),
    "eps": lambda x, b: softmax_router(x, eps=1e-3),
    "as they are": lambda x, b: softmax_router(x, normalize=False, scale=16.0),
    "one expert": lambda x, b: softmax_router(x, k=1, normalize=False),
    "softmax of the chosen": lambda x, b: softmax_of_chosen(x),
    "deepseek_v3": grouped_router,
    "deepseek_v3, no bias": lambda x, b: grouped_router(x, None),
    "deepseek_v3, zeros, no bias": lambda x, b: grouped_router(x, None, fill=0.0),
    "deepseek_v3 as it was published": lambda x, b: grouped_router(x, b, spelling="published"),
    "deepseek_v3 as it was published, no bias": lambda x, b: grouped_router(x, None, spelling="published"),
    "torchtitan": lambda x, b: grouped_router(x, b, spelling="torchtitan"),
    "where": lambda x, b: grouped_router(x, b, spelling="where"),
    "deepseek_v2": lambda x, b: grouped_router(x, None, best=1, score="softmax", fill=0.0),
    "every group": lambda x, b: grouped_router(x, b, groups=2, kept=2),
}


@pytest.mark.parametrize("target", ["npu", "cpu"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_rewritten(name, target):
    f, options = SPELLINGS[name], {"enable": [NAME]} if target == "cpu" else {}
    report = function_agrees(f, logits(), bias().double(), tolerance=1e-9, target=target, **options)
    assert fusion_counts(report) == {NAME: 1} and not report.skipped(NAME)


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


BIAS = bias()
IN_16_BITS = {
    "mixtral": lambda x: softmax_router(x, dtype=wide(x).dtype).to(x.dtype),
    "softmax of the chosen": softmax_of_chosen,
    "deepseek_v3": lambda x: grouped_router(wide(x), BIAS.to(wide(x).dtype)).to(x.dtype),
}


@pytest.mark.parametrize("name", IN_16_BITS)
def test_bfloat16_is_as_close_to_float64_as_the_unfused_router(name):
    f = IN_16_BITS[name]

    def run(f, x):
        x = x.detach().requires_grad_()
        y = f(x)
        grad = torch.autograd.grad(y, x, torch.linspace(0.5, 1.5, y.numel()).view_as(y).to(y.dtype))[0]
        return y.double(), grad.double()

    x = logits(torch.bfloat16)
    torch._dynamo.reset()
    with npu_graphs.lowered() as graphs:
        ours = run(torch.compile(f, backend="mindspeed", options=npu_graphs.OPTIONS), x)
    for have, own, want in zip(ours, run(f, x), run(f, x.double()), strict=True):
        error, eager = ((y - want).abs().max() for y in (have, own))
        assert error <= max(1.5 * eager, 2**-8 * want.abs().max())
    assert not graphs.unlowered() and not graphs.left()
    if name == "deepseek_v3":
        assert graphs.npu() == {"npu_moe_gating_top_k": 1, "npu_moe_gating_top_k_backward": 1}
    else:
        assert graphs.npu() == {"npu_moe_gating_top_k_softmax_v2": 1}


def test_scores_that_are_read_besides_stay():
    """An auxiliary loss reads all probabilities; both ways of the gradient add up."""

    def f(x):
        probs = x.softmax(-1)
        weights, ids = probs.topk(2, -1)
        return dense(weights / weights.sum(-1, keepdim=True), ids, 12), probs.mean(0).square().sum(), x * 2

    assert fusion_counts(function_agrees(f, logits(), target="npu")) == {NAME: 1}


def test_weights_that_are_read_before_their_division_end_it():
    def f(x):
        weights, ids = x.softmax(-1).topk(2, -1)
        return dense(weights / weights.sum(-1, keepdim=True), ids, 12), weights.square()

    assert fusion_counts(function_agrees(f, logits(), target="npu")) == {NAME: 1}


def biased_weights(x, b):
    values, ids = (x.sigmoid() + b).topk(2, -1)
    return dense(values, ids, 12)


def read_twice(x):
    probs = x.softmax(-1)
    values, ids = probs.topk(2, -1)
    return dense(values, ids, 12) + dense(probs.gather(1, ids), ids, 12)


def clamped(x, least):
    weights, ids = x.softmax(-1).topk(2, -1)
    return dense(weights / weights.sum(-1, keepdim=True).clamp(min=least), ids, 12)


def without_gradients(x, b):
    scores = x.sigmoid()
    with torch.no_grad():
        ids = (scores + b).topk(2, -1)[1]
    return dense(scores.gather(1, ids), ids, 12)


NEAR = {
    "bias in the weights": (biased_weights, "the weights hold the bias"),
    "read twice": (lambda x, b: read_twice(x), "read both from the choice and from the scores"),
    "a bias for each token": (lambda x, b: grouped_router(x, b.expand(9, 12)), "shape [9, 12]; one number for each"),
    "a least sum": (lambda x, b: clamped(x, 0.5), "at least by 0.5"),
    "zeros and a bias": (lambda x, b: grouped_router(x, b, fill=0.0), "which a bias may make more"),
    "other scores of groups": (lambda x, b: grouped_router(x, b, scored=torch.exp), "scored by other numbers"),
    "more than the groups hold": (
        lambda x, b: grouped_router(x, None, k=4, kept=1, fill=0.0, best=1, score="softmax"),
        "4 experts are chosen of the 3",
    ),
    "three of a group": (
        lambda x, b: dense(*three_of_a_group(x), 12),
        "sum of 3 of its experts; valid: 1 or 2",
    ),
    "choice without gradients": (without_gradients, "gradients off"),
}


def three_of_a_group(x):
    scores = x.sigmoid()
    ids = scores.view(-1, 4, 3).topk(3, -1)[0].sum(-1).topk(2, -1)[1]
    mask = torch.ones(9, 4, dtype=torch.bool).scatter(1, ids, False).unsqueeze(-1)
    ids = scores.view(-1, 4, 3).masked_fill(mask, -math.inf).view(-1, 12).topk(2, -1)[1]
    return scores.gather(1, ids), ids


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name):
    f, reason = NEAR[name]
    report = function_agrees(f, logits(), bias().double(), target="npu")
    assert NAME not in fusion_counts(report)
    assert [s.reason for s in report.skipped(NAME) if reason in s.reason], report.skipped(NAME)


@pytest.mark.parametrize("scores", [lambda x: x.softmax(-1), lambda x: x.float().sigmoid().type_as(x)])
def test_scores_in_16_bits_are_left(scores):
    report = function_agrees(lambda x: dense(*scores(x).topk(2, -1), 12), logits(torch.bfloat16), target="npu")
    assert NAME not in fusion_counts(report)
    assert ["scores are in bfloat16" in s.reason for s in report.skipped(NAME)] == [True]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.topk(2, -1)[0] * 2,  # no scores
        lambda x: x.softmax(0).topk(2, -1)[0] * 2,  # of tokens
        lambda x: x.softmax(-1).topk(2, 0)[0] * 2,
        lambda x: x.softmax(-1).topk(2, -1, largest=False)[0] * 2,
        lambda x: (x * x.softmax(-1).topk(2, -1)[1].sum(-1, keepdim=True)).sin(),  # an auxiliary loss reads ids alone
        lambda x: grouped_router(x, None, spelling="alternating"),
    ],
)
def test_what_is_no_router_is_not_spoken_of(f):
    report = function_agrees(f, logits(), target="npu")
    assert NAME not in fusion_counts(report) and not report.skipped(NAME)


@pytest.mark.parametrize("target, hardware", [("cpu", None), ("cuda", "h100")])
def test_left_where_code_is_generated(target, hardware):
    options = {"target": target} | ({"hardware": hardware} if hardware else {})
    report = explain(lambda x: softmax_router(x, dtype=torch.float32), logits(torch.float32), **options)
    assert NAME not in fusion_counts(report)
    assert ["the sort of the choice stays" in s.reason for s in report.skipped(NAME)] == [True]


ROUTERS = {
    "mixtral": ("MixtralTopKRouter", dict(num_local_experts=8)),
    "qwen3_moe": ("Qwen3MoeTopKRouter", dict(num_experts=8, num_experts_per_tok=2)),
    "qwen3_next": ("Qwen3NextTopKRouter", dict(num_experts=8, num_experts_per_tok=2)),
    "gpt_oss": ("GptOssTopKRouter", dict(num_local_experts=8, num_experts_per_tok=2)),
    "ernie4_5_moe": ("Ernie4_5_MoeTopKRouter", dict(moe_num_experts=8, moe_k=2)),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        dict(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2, topk_method="group_limited_greedy"),
    ),
    "deepseek_v3": ("DeepseekV3TopkRouter", dict(n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2)),
    "glm4_moe": ("Glm4MoeTopkRouter", dict(n_routed_experts=8, n_group=1, topk_group=1, num_experts_per_tok=2)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    cls, sizes = ROUTERS[name]
    config = transformers.AutoConfig.for_model(name, hidden_size=32, **sizes)
    router = part_of(f"models.{name}.modeling_{name}", cls)(config)
    torch.manual_seed(0)
    for tensor in [*router.parameters(), *router.buffers()]:
        torch.nn.init.normal_(tensor, std=0.3)
    x = torch.randn(10, 32, requires_grad=True)
    if not isinstance(results := router(x), tuple) or [r.dtype for r in results[2:]] != [torch.int64]:
        pytest.skip(f"{cls} of transformers {transformers.__version__} does not return scores, weights and numbers")

    def f(x):
        scores, weights, ids = router(x)
        return scores, dense(weights, ids, 8)

    assert fusion_counts(function_agrees(f, x, tolerance=1e-4, target="npu")) == {NAME: 1}


MEGATRON = {
    "softmax of the chosen": {},
    "softmax before": dict(use_pre_softmax=True, scaling_factor=2.5),
    "sigmoid": dict(score_function="sigmoid"),
    "groups": dict(score_function="sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5),
}


@pytest.mark.parametrize("name, biased", [*((name, False) for name in MEGATRON), ("sigmoid", True), ("groups", True)])
def test_router_of_megatron(name, biased):
    """Where its logits are float32 (``--moe-router-dtype fp32``), and of any type with a softmax of the chosen."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    given = MEGATRON[name]

    def f(x):
        probs, chosen = moe_utils.topk_routing_with_score_function(x, 4, expert_bias=BIAS if biased else None, **given)
        return probs, chosen.int()

    report = function_agrees(f, logits(torch.float32), tolerance=1e-5, target="npu")
    assert fusion_counts(report) == {NAME: 1}, report.skipped(NAME)


@pytest.mark.parametrize(
    "name, count", [("mixtral", 2), pytest.param("qwen3_moe", 2, marks=pytest.mark.slow), ("deepseek_v3", 1)]
)
def test_exact_counts_on_models(name, count):
    """DeepSeek-V3's first layer is dense, and transformers 5.0 fills its groups with 0. The loss of the balance
    between experts chooses too, without weights."""
    if name != "deepseek_v3":
        need_whole_experts()  # else there is one graph for the routers of all layers
    model, inputs = architectures.build(name)
    extra = {} if name == "deepseek_v3" else dict(output_router_logits=True)
    torch._dynamo.reset()
    report = mindspeed_fx.explain(model.to(torch.bfloat16), **inputs, **extra, options=npu_graphs.OPTIONS)
    reasons = [s.reason for s in report.skipped(NAME)]
    if name == "deepseek_v3" and "masked_fill(~score_mask.bool(), 0.0)" in inspect.getsource(inspect.getmodule(model)):
        assert report.counts[NAME] == 0 and "get 0, which a bias may make more than another's score" in reasons[0]
    else:
        assert report.counts[NAME] == count and not reasons
