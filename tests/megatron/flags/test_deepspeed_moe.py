"""DeepSpeed's experts by MindSpeed's flags, in float64 against masks and einsums as GShard and DeepSpeed have them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from mindspeed_fx.megatron.deepspeed_moe import Gate
from mindspeed_fx.megatron.model_parts import add_parts
from tests import ranks
from tests.megatron.flags.values import apply, normal

EXPERTS, HIDDEN, SEQ, BATCH = 4, 32, 12, 2
TYPE = f"--moe-model-type deepspeed_moe --num-experts {EXPERTS} --ffn-hidden-size 64 --seq-length {SEQ}"
NAMES = """moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_dispatcher_type
    moe_router_load_balancing_type moe_router_pre_softmax moe_router_topk moe_aux_loss_coeff""".split()
RUNS = {
    "two": "--moe-train-capacity-factor 0.75",
    "two, all fits": "--moe-train-capacity-factor 4 --enable-token-rearrange-opt",
    "one": "--moe-router-topk 1 --moe-train-capacity-factor 1.1 --no-use-rts",
    "two, not dropped": "--moe-no-drop --moe-dynamic-padding",
    "one, not dropped": "--moe-router-topk 1 --moe-no-drop",
    "sinkhorn": "--moe-use-sinkhorn --moe-train-capacity-factor 0.6",
    "parts": "--ampipe-degree 2 --moe-train-capacity-factor 0.75",
    "loss of balance": "--moe-train-capacity-factor 0.75 --moe-aux-loss-coeff 0.5",
    "by experts": "--use-pipe-experts --moe-train-capacity-factor 0.75",
    "by slices": "--use-pipe-experts --pipe-experts-multi-data 4 --moe-train-capacity-factor 0.75",
    "by parts": "--ampipe-degree 3 --moe-train-capacity-factor 0.75",
    "by parts and slices": "--use-pipe-experts --pipe-experts-multi-data 4 --ampipe-degree 2",
}
"""Flags of the layer; the capacities drop tokens but where it says so."""


def build(words: str, **more):
    """(a layer of experts in float64 whose weights follow from their number, the arguments)."""
    from tests.megatron.gpt_models import tiny_gpt

    args = apply(f"{TYPE} {words}")
    fields = {name: getattr(args, name) for name in NAMES} | {"moe_router_dtype": "fp64"} | more
    model = tiny_gpt(layers=1, experts=EXPERTS, **fields)
    add_parts(model, args)
    layer = model.decoder.layers[0].mlp.double()
    first = layer.local_expert_indices[0]
    with torch.no_grad():
        layer.router.weight.copy_(gate_weight())
        for i, expert in enumerate(layer.experts.local_experts):
            for parameter, value in zip(expert.parameters(), expert_weights(first + i)):
                parameter.copy_(value)
    return layer, args


def gate_weight() -> torch.Tensor:
    return normal(1, EXPERTS, HIDDEN) * 0.2 * torch.tensor([[3.0], [1.0], [1.0], [1.0]], dtype=torch.float64)


def expert_weights(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(10 + number, 128, HIDDEN) * 0.2, normal(20 + number, HIDDEN, 64) * 0.2


def hidden_states(rank: int = 0) -> torch.Tensor:
    x = normal(30 + rank, SEQ, BATCH, HIDDEN)
    return (x + 0.5 * gate_weight()[0]).requires_grad_()


def sinkhorn(logits: torch.Tensor) -> torch.Tensor:
    c = logits.exp()
    (rows, columns), b, change = c.shape, torch.ones_like(c[0]), 1e9
    while change > 1e-4:
        before = b
        a = 1 / rows / ((b * c).sum(1) + 1e-8)
        b = 1 / columns / ((a[:, None] * c).sum(0) + 1e-8)
        change = (before - b).abs().mean()
    return b * c * a[:, None]


def by_einsum(x, weight, experts, args):
    """DeepSpeed's layer: (its result [tokens, hidden], its loss of balance, tokens dropped)."""
    tokens, k = x.shape[0], args.moe_router_topk
    logits = x @ weight.T
    p = (sinkhorn(logits) if args.moe_use_sinkhorn else logits).softmax(-1)
    top = p.topk(k, dim=-1).indices
    masks = [functional.one_hot(top[:, i], EXPERTS).double() for i in range(k)]
    capacity = tokens
    if not args.moe_no_drop:
        product = torch.tensor(tokens / EXPERTS) * torch.tensor(args.moe_train_capacity_factor * k)  # in float32
        capacity = min(max(math.ceil(product), 4), tokens)
    combine, taken, weights = 0, torch.zeros(EXPERTS, dtype=torch.float64), []
    for mask in masks:
        places = mask.cumsum(0) - 1 + taken
        taken = taken + mask.sum(0)
        kept = mask * (places < capacity)
        weights.append((p * kept).sum(-1))
        of_token = functional.one_hot((places * kept).sum(-1).long(), capacity).double()
        combine = combine + torch.einsum("s,se,sc->sec", weights[-1], kept, of_token)
    if k == 2:
        combine = combine / sum(weights).clamp(min=torch.finfo(p.dtype).eps)[:, None, None]
    came = torch.einsum("sec,sm->ecm", (combine > 0).double(), x)
    made = torch.stack([expert(rows) for expert, rows in zip(experts, came)])
    loss = (p.mean(0) * masks[0].mean(0)).mean() * EXPERTS**2
    return torch.einsum("sec,ecm->sm", combine, made), loss, tokens * k - int((combine > 0).sum())


def mlp(first: torch.Tensor, second: torch.Tensor):
    def expert(rows):
        gate, up = (rows @ first.T).chunk(2, -1)
        return (functional.silu(gate) * up) @ second.T

    return expert


def expected(x, weight, weights, args):
    """(result, loss of balance of all parts, tokens dropped) of one rank's hidden states."""
    experts = [mlp(*pair) for pair in weights]
    results = [by_einsum(part.flatten(0, 1), weight, experts, args) for part in x.chunk(args.ampipe_degree)]
    output = torch.cat([r[0] for r in results]).view_as(x)
    return output, sum(r[1] for r in results) / len(results), sum(r[2] for r in results)


def leaves_of_formula():
    weights = [tuple(w.clone().requires_grad_() for w in expert_weights(i)) for i in range(EXPERTS)]
    return gate_weight().requires_grad_(), weights


def agree(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("run", [run for run in RUNS if not run.startswith("by ")])
def test_a_layer_by_formula(run):
    layer, args = build(RUNS[run])
    x, towards = hidden_states(), normal(5, SEQ, BATCH, HIDDEN)
    weight, weights = leaves_of_formula()
    output, loss, dropped = expected(x, weight, weights, args)
    assert (dropped > 0) == ("fits" not in run and "not dropped" not in run), dropped
    coefficient = args.moe_aux_loss_coeff
    leaves = [x, weight, *(w for pair in weights for w in pair)]
    wanted = torch.autograd.grad((output * towards).sum() + coefficient * loss, leaves)
    parameters = [layer.router.weight, *(p for e in layer.experts.local_experts for p in e.parameters())]
    for forward in (layer, torch.compile(layer, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)):
        found, _ = forward(x)
        agree([found], [output])
        agree(torch.autograd.grad((found * towards).sum(), [x, *parameters]), wanted)


def of_two_ranks(rank: int, words: str, compiles: bool) -> None:
    layer, args = build(words, expert_model_parallel_size=2)
    xs, towards = [hidden_states(0), hidden_states(1)], [normal(5 + r, SEQ, BATCH, HIDDEN) for r in (0, 1)]
    weight, weights = leaves_of_formula()
    outputs = [expected(x, weight, weights, args)[0] for x in xs]
    of_x, of_gate = torch.autograd.grad((outputs[rank] * towards[rank]).sum(), [xs[rank], weight], retain_graph=True)
    own = [w for pair in weights[2 * rank : 2 * rank + 2] for w in pair]  # to which both ranks send tokens
    of_experts = torch.autograd.grad(sum((o * t).sum() for o, t in zip(outputs, towards)), own)
    parameters = [layer.router.weight, *(p for e in layer.experts.local_experts for p in e.parameters())]
    compiled = torch.compile(layer, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    for forward in (layer, compiled) if compiles else (layer,):
        x = hidden_states(rank)
        found, _ = forward(x)
        agree([found], [outputs[rank]])
        agree(torch.autograd.grad((found * towards[rank]).sum(), [x, *parameters]), [of_x, of_gate, *of_experts])


def worker(rank: int, store: str, runs: list[str], compiles: bool) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch._dynamo.utils import counters

    import mindspeed_fx.megatron_adaptor

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    for words in runs:
        torch._dynamo.reset()
        counters.clear()
        of_two_ranks(rank, words, compiles)
        assert counters["stats"]["unique_graphs"] == compiles
    dist.destroy_process_group()


IN_PIECES = [run for run in RUNS if run.startswith("by ")]


@pytest.mark.parametrize(
    "runs, compiles",
    [
        (["two", "one, not dropped"], True),
        (IN_PIECES, False),
        pytest.param(IN_PIECES, True, marks=pytest.mark.slow),
    ],
)
def test_experts_of_two_ranks(runs, compiles, tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), [RUNS[run] for run in runs], compiles))


def test_capacities_are_rounded_as_deepspeed_rounds_them():
    """25 * 2.2 is 55 in float32, and more in float64."""
    for tokens, experts, factor, k in (
        (40, 4, 1.1, 1),
        (200, 4, 1.1, 1),
        (64, 2, 1.1, 2),
        (1000, 8, 1.1, 2),
        (4096, 64, 1.25, 2),
    ):
        product = torch.tensor(tokens / experts) * torch.tensor(factor * k)
        assert Gate(k, factor).capacity(tokens, experts) == min(math.ceil(product), tokens)
    assert Gate(2, 1.1).capacity(100, 4) == 55 < math.ceil(100 / 4 * 1.1 * 2)
    assert (Gate(2, 0.1).capacity(64, 8), Gate(2, 0.1).capacity(3, 8), Gate(2, 9.0).capacity(64, 8)) == (4, 3, 64)
    assert Gate(1, None).capacity(40, 4) is None and Gate(1, 1.1, parts=2).rows(80, 4) == 22


@pytest.mark.usefixtures("on_one_rank")
def test_noise_of_the_gate():
    """In training alone; RSample draws an expert by its probability."""
    x = hidden_states().detach()
    for policy, k in (("RSample", 1), ("Jitter", 2)):
        layer, _ = build(f"--noisy-gate-policy {policy} --moe-router-topk {k} --moe-no-drop")
        plain, _ = build(f"--moe-router-topk {k} --moe-no-drop")
        assert not torch.equal(layer(x)[0], plain(x)[0])
        layer.eval()
        assert torch.equal(layer(x)[0], plain.eval()(x)[0])
    layer, _ = build("--noisy-gate-policy RSample --moe-router-topk 1 --moe-no-drop")
    torch.manual_seed(0)
    logits = torch.tensor([0.3, -1.0, 0.1, 0.8], dtype=torch.float64).expand(20_000, 1, EXPERTS)
    probs, kept = layer.router.routing(logits)
    torch.testing.assert_close(kept.double().mean(0), logits[0, 0].softmax(-1), rtol=0, atol=0.015)
    assert torch.equal(probs, logits[:, 0].softmax(-1) * kept)


def test_the_gradient_of_sinkhorn():
    from mindspeed_fx.megatron.sinkhorn import sinkhorn_backward

    logits, towards = normal(2, 7, 5).requires_grad_(), normal(3, 7, 5)
    (wanted,) = torch.autograd.grad((sinkhorn(logits) * towards).sum(), logits)
    torch.testing.assert_close(sinkhorn_backward(towards, logits.detach(), 1e-4), wanted, rtol=1e-10, atol=1e-14)
