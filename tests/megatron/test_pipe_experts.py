"""DeepSpeed's experts in pieces: what stands between the start of an exchange and its wait, forward and backward.

Values are those of the formula: tests/megatron/flags/test_deepspeed_moe.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_fx import backend
from tests import ranks
from tests.megatron.flags.test_deepspeed_moe import TYPE, build, hidden_states
from tests.megatron.flags.values import apply, normal

OVERLAP = "overlap.*"


@pytest.fixture(autouse=True)
def adaptor():
    """No group of one rank, which other tests of this folder share."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def two_fake_ranks():
    """Rank 0 of two expert ranks: graphs and their order; collectives move nothing."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import mindspeed_fx.megatron_adaptor

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    mindspeed_fx.megatron_adaptor.undo()


@pytest.fixture
def orders(monkeypatch):
    """Side of a graph -> its exchanges, waits and products in the order in which they run: "x0", "w0", "p"."""
    found: dict[str, list[str]] = {}
    finish = backend.Compilation.finish_side

    def look(self, gm, side):
        finish(self, gm, side)
        found[side] = order_of(gm)

    monkeypatch.setattr(backend.Compilation, "finish_side", look)
    return found


def order_of(gm) -> list[str]:
    """Starts and waits of exchanges by their number, and products."""
    order, numbers = [], {}
    for node in (n for n in gm.graph.nodes if n.op == "call_function"):
        name = str(node.target)
        if "all_to_all_single" in name:
            numbers[node] = len(numbers)
            order.append(f"x{numbers[node]}")
        elif "wait_tensor" in name and node.args[0] in numbers:
            order.append(f"w{numbers[node.args[0]]}")
        elif any(word in name for word in ("mm", "grouped_linear", "attention")):
            order.append("p")
    return order


def compiled(module, **options):
    torch._dynamo.reset()
    return torch.compile(module, backend="mindspeed", options={"codegen": "eager", **options}, fullgraph=True)


FORWARD = "p x0 x1 w0 p p x2 w1 p p x3 w2 w3".split()
"""Two pieces, two products each; the first product is the gate's."""
BACKWARD = "x0 x1 w0 p p p p x2 w1 p p p p x3 w2 w3 p p".split()


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize("disabled", [[OVERLAP], []])
def test_the_order_of_experts(orders, disabled):
    """An exchange starts before the product of the piece before it, and is waited for after that; also as the layer has
    it, without a pass that orders anything."""
    layer, _ = build("--use-pipe-experts --moe-train-capacity-factor 0.75", expert_model_parallel_size=2)
    compiled(layer, disable=disabled)(hidden_states())[0].sum().backward()
    if disabled:
        assert (orders["forward"], orders["backward"]) == (FORWARD, BACKWARD)
    for order in orders.values():
        hidden = between(order)
        assert hidden[1] and hidden[2], order  # the second exchange there and the first one back


def between(order: list[str]) -> list[int]:
    """Products between the start and the wait of each exchange."""
    places = {name: place for place, name in enumerate(order)}
    exchanges = sum(name.startswith("x") for name in order)
    return [order[places[f"x{k}"] : places[f"w{k}"]].count("p") for k in range(exchanges)]


@pytest.mark.usefixtures("two_fake_ranks")
def test_slices_of_an_expert(orders):
    """All but the first exchange there and the last one back run under products."""
    layer, _ = build("--use-pipe-experts --pipe-experts-multi-data 3", expert_model_parallel_size=2)
    compiled(layer, disable=[OVERLAP])(hidden_states())[0].sum().backward()
    for order in orders.values():
        hidden = between(order)
        assert len(hidden) == 12 and all(hidden[1:-1]), order
        assert "".join(order).count("x") == 12 and order.count("p") in (1 + 12, 2 + 24)


@pytest.mark.usefixtures("two_fake_ranks")
def test_more_slices_than_rows():
    layer, _ = build("--use-pipe-experts --pipe-experts-multi-data 13", expert_model_parallel_size=2)
    with pytest.raises(ValueError, match="makes 13 slices of the 12 rows that an expert takes; give 12 or fewer"):
        layer(hidden_states())


def divided_layer(words: str, **more):
    """A transformer layer with DeepSpeed's experts, in float64, of which only the exchanges are of several ranks."""
    from mindspeed_fx.megatron.model_parts import add_parts
    from tests.megatron.gpt_models import tiny_gpt

    args = apply(f"{TYPE} {words}")
    fields = dict(
        moe_expert_capacity_factor=args.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=True,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        moe_router_dtype="fp64",
    )
    model = tiny_gpt(layers=1, experts=4, **fields, **more)
    add_parts(model, args)
    layer = model.decoder.layers[0].double()
    for n, parameter in enumerate(layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(n))
    return layer


@pytest.mark.usefixtures("two_fake_ranks")
def test_the_order_of_attention_and_experts(orders):
    """The exchange of a part's tokens runs under the attention of the next one."""
    layer = divided_layer("--ampipe-degree 2", expert_model_parallel_size=2)
    compiled(layer, disable=[OVERLAP])(hidden_states())[0].sum().backward()
    assert between(orders["forward"]) == [3, 2, 2, 0], orders  # attention, projection and gate; two products of experts
    there, _, _, back = between(orders["backward"])
    assert there == 0 and back >= 5, orders  # of the second part: gate, projection and attention


RUNS = ["--ampipe-degree 2", "--ampipe-degree 3 --ampipe-tp-sp-comm-overlap --moe-aux-loss-coeff 0.5"]
PIPED = "--use-pipe-experts --pipe-experts-multi-stream --pipe-experts-multi-data"
SEVERAL = [f"--ampipe-degree 2 {PIPED} 4", "--ampipe-degree 2", f"{PIPED} 2"]
DIVIDED = "--tensor-model-parallel-size 2 --sequence-parallel"


def train(layer, call, towards):
    x = hidden_states(dist.get_rank())
    out, _ = call(x, **{"attention_mask": None, "rotary_pos_emb": None})
    leaves = [x, *layer.parameters()]
    return out, torch.autograd.grad((out * towards).sum(), leaves)


def worker(rank: int, store: str, tp: int, compiles: bool) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import mindspeed_fx.megatron_adaptor

    mindspeed_fx.megatron_adaptor.apply()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2 * tp), rank=rank, world_size=2 * tp)
    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=2, expert_tensor_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    more = dict(expert_model_parallel_size=2, tp=tp, sequence_parallel=tp > 1)
    for words in RUNS if tp == 1 else [f"{run} {DIVIDED}" for run in SEVERAL]:
        layer = divided_layer(words, **more)
        assert ("forward" in vars(layer)) == ("ampipe" in words)
        towards = normal(7 + rank, *hidden_states().shape)
        wanted = train(layer, lambda *args, **kw: type(layer).forward(layer, *args, **kw), towards)
        pieces, layer.mlp.pieces = layer.mlp.pieces, None
        whole = train(layer, lambda *args, **kw: type(layer).forward(layer, *args, **kw), towards)
        layer.mlp.pieces = pieces
        calls = [layer, compiled(layer)] if compiles else [layer]
        for results in (wanted, *(train(layer, call, towards) for call in calls)):
            torch.testing.assert_close(results, whole, rtol=1e-9, atol=1e-10)
    dist.destroy_process_group()


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_layer_in_parts_is_the_layer(compiles, tmp_path):
    ranks.spawn(worker, (str(tmp_path / "store"), 1, compiles))


@pytest.mark.slow
def test_a_layer_in_parts_on_four_ranks(tmp_path):
    """Two tensor-parallel ranks with a part of the sequence, and of the experts, each."""
    ranks.spawn(worker, (str(tmp_path / "store"), 2, True), nprocs=4)
