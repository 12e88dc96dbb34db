"""DeepSeek-V2's router by MindSpeed-LLM's flags, against its formulas written out in float64."""

from __future__ import annotations

import pytest
import torch

from tests import ranks
from tests.megatron.flags.values import apply, fill_experts, normal

EXPERTS, SEQ, BATCH, HIDDEN = 8, 6, 2, 32
TYPE = (
    "--moe-router-load-balancing-type group_limited_greedy --num-experts 8 --moe-router-topk 3 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --ffn-hidden-size 64"
)
LOSSES = "--moe-aux-loss-coeff 0.3 --moe-device-level-aux-loss-coeff 0.5 --moe-comm-aux-loss-coeff 0.2"
RUNS = {
    "no loss": "",
    "losses": LOSSES,
    "losses of sequences": f"{LOSSES} --seq-aux",
    "weights add up": f"{LOSSES} --norm-topk-prob",
}


def build(words: str, **more):
    """(a layer of experts in float64, the arguments)."""
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import tiny_gpt

    args = apply(f"{TYPE} {words}")
    fields = dict(
        moe_router_topk=3,
        moe_router_load_balancing_type=args.moe_router_load_balancing_type,
        moe_router_pre_softmax=True,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff or 0.0,
        moe_router_dtype="fp64",
        moe_token_dispatcher_type="alltoall",
    )
    model = tiny_gpt(layers=1, experts=EXPERTS, **fields | more)
    add_parts(model, args)
    layer = model.decoder.layers[0].mlp.double()
    fill_experts(layer)
    return layer, args


def choice(s: list[float], normalizes: bool) -> dict[int, float]:
    """Expert -> weight of a token, as MindSpeed-LLM's router.py has it, written out."""
    best = sorted(range(4), key=lambda d: -max(s[2 * d], s[2 * d + 1]))[:2]
    seen = [i for d in best for i in (2 * d, 2 * d + 1)]
    chosen = sorted(seen, key=lambda i: -s[i])[:3]
    total = sum(s[i] for i in chosen) if normalizes else 1 / 2.5
    return {i: s[i] / total for i in chosen}


def losses(scores: torch.Tensor, chosen: list[list[dict[int, float]]], coefficients) -> torch.Tensor:
    """Those of tokens [sequences][tokens], all taken together: scores [sequences * tokens, experts]."""
    tokens = [t for sequence in chosen for t in sequence]
    n = [sum(i in t for t in tokens) for i in range(EXPERTS)]
    m = [sum(any(i // 2 == d for i in t) for t in tokens) for d in range(4)]
    f = [n[i] * EXPERTS / (3 * len(tokens)) for i in range(EXPERTS)]
    p = scores.mean(0)
    q = [p[2 * d] + p[2 * d + 1] for d in range(4)]
    experts = sum(f[i] * p[i] for i in range(EXPERTS))
    devices = sum((f[2 * d] + f[2 * d + 1]) / 2 * q[d] for d in range(4))
    messages = sum(m[d] * 4 / (2 * len(tokens)) * q[d] for d in range(4))
    return coefficients[0] * experts + coefficients[1] * devices + coefficients[2] * messages


def by_formula(logits: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [seq, batch, experts], the loss) for logits [seq, batch, experts]."""
    scores = logits.softmax(-1)
    chosen = [[choice(row.tolist(), args.norm_topk_prob) for row in scores[:, b]] for b in range(scores.shape[1])]
    weights = torch.zeros_like(scores)
    for b, sequence in enumerate(chosen):
        for s, token in enumerate(sequence):
            total = sum(scores[s, b, i] for i in token) if args.norm_topk_prob else 1 / 2.5
            for i in token:
                weights[s, b, i] = scores[s, b, i] / total
    a = (args.moe_aux_loss_coeff or 0.0, args.moe_device_level_aux_loss_coeff, args.moe_comm_aux_loss_coeff)
    if args.seq_aux:
        each = [losses(scores[:, b], [sequence], a) for b, sequence in enumerate(chosen)]
        return weights, sum(each) / len(each)
    return weights, losses(scores.transpose(0, 1).flatten(0, 1), chosen, a)


@pytest.mark.usefixtures("on_one_rank")
@pytest.mark.parametrize("run", RUNS)
def test_a_router_by_formula(run):
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    layer, args = build(RUNS[run])
    logits, towards = normal(2, SEQ, BATCH, EXPERTS).requires_grad_(), normal(3, SEQ * BATCH, EXPERTS)
    weights, loss = by_formula(logits, args)
    (wanted,) = torch.autograd.grad((weights.flatten(0, 1) * towards).sum() + loss, logits)
    get_moe_layer_wise_logging_tracker().clear()
    probs, routing_map = layer.router.routing(logits)
    torch.testing.assert_close(probs, weights.flatten(0, 1), rtol=1e-10, atol=1e-12)
    assert torch.equal(routing_map, probs > 0) and (routing_map.sum(1) == 3).all()
    torch.testing.assert_close(torch.autograd.grad((probs * towards).sum(), logits)[0], wanted, rtol=1e-10, atol=1e-12)
    tracker = get_moe_layer_wise_logging_tracker()
    if run == "no loss":
        assert not tracker
    else:
        torch.testing.assert_close(tracker["load_balancing_loss"]["values"][0].double(), loss.detach())


@pytest.mark.usefixtures("on_one_rank")
def test_a_layer_in_one_graph():
    from mindspeed_fx.megatron import logged_losses

    layer, _ = build(LOSSES)
    logged_losses.prepare(layer.config)
    results = []
    for call in (layer, torch.compile(layer, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)):
        x = normal(4, SEQ, BATCH, HIDDEN).requires_grad_()
        out, _ = call(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def worker(rank: int, store: str) -> None:
    """Two ranks with a part of each sequence: the losses are those of the whole."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import mindspeed_fx.megatron_adaptor

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    model_parallel_cuda_manual_seed(1)
    for run in ("losses", "losses of sequences"):
        layer, args = build(RUNS[run], tp=2, sequence_parallel=True)
        logits, towards = normal(2, SEQ, BATCH, EXPERTS).requires_grad_(), normal(3, SEQ, BATCH, EXPERTS)
        weights, loss = by_formula(logits, args)
        (wanted,) = torch.autograd.grad((weights * towards).sum() + loss, logits)
        own = slice(rank * SEQ // 2, (rank + 1) * SEQ // 2)
        part = logits.detach()[own].clone().requires_grad_()
        probs, _ = layer.router.routing(part)
        (found,) = torch.autograd.grad((probs * towards[own].flatten(0, 1)).sum(), part)
        torch.testing.assert_close(found, wanted[own], rtol=1e-10, atol=1e-12)
    dist.destroy_process_group()


def test_losses_of_divided_sequences(tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"),))
