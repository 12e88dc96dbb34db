"""Estimates of whole graphs: hand-counted, dynamic, fused, nested, with collectives."""

import operator

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_fx.cost import graph
from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.cost.graph import estimate
from mindspeed_fx.cost.hardware import hardware

aten = torch.ops.aten


def traced(function, *args, mode="fake", **kwargs):
    return make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True, **kwargs)(*args)


class Block(torch.nn.Module):
    """A transformer block of 24 b s h^2 + 4 b s^2 h FLOP."""

    def __init__(self, hidden=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = (
            torch.nn.Linear(hidden, 3 * hidden, bias=False),
            torch.nn.Linear(hidden, hidden, bias=False),
        )
        self.up, self.down = (
            torch.nn.Linear(hidden, 4 * hidden, bias=False),
            torch.nn.Linear(4 * hidden, hidden, bias=False),
        )

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, h))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


NAMES = {"b": 3, "s": 128, "h": 64, "3*h": 192, "4*h": 256, "h/4": 16}
b, s, h = sympy.symbols("b s h", positive=True)


@pytest.mark.parametrize("pre_dispatch", [True, False])
def test_a_block_is_24_b_s_h_squared(pre_dispatch):
    model, x = Block(), torch.randn(3, 128, 64)
    made = estimate(traced(model, x, pre_dispatch=pre_dispatch), "ascend910b2")
    assert made.flops == 24 * 3 * 128 * 64**2 + 4 * 3 * 128**2 * 64
    assert made.expression("flops", NAMES) == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert made.notes == []


def test_forward_and_backward_agree_with_torchs_counter():
    model, x = Block(), torch.randn(2, 16, 64, requires_grad=True)

    def step(x, *parameters):
        out = torch.func.functional_call(model, dict(zip(dict(model.named_parameters()), parameters)), (x,))
        return torch.autograd.grad(out.square().sum(), (x, *parameters))

    gm = traced(step, x, *model.parameters())
    with FlopCounterMode(display=False) as counter:
        gm(x, *model.parameters())
    # torch has no formula for its attention on cpu: two products forward, five backward.
    attention = [n for n in estimate(gm, "cpu").nodes if "attention" in n.operator]
    assert [n.cost.flops for n in attention] == [4 * 2 * 16 * 16 * 64, 10 * 2 * 16 * 16 * 64]
    assert [round(n.cost.matrix / n.cost.flops, 3) for n in attention] == [round(17 / 32, 3)] * 2, "causal"
    assert estimate(gm, "cpu").flops == counter.get_total_flops() + sum(n.cost.flops for n in attention)


def test_views_cost_nothing_and_pointwise_moves_each_tensor_once():
    made = estimate(
        traced(lambda x, y: (x.t() + y.view(6, 4)).t().reshape(-1)[2:], torch.randn(4, 6), torch.randn(24)), "h100"
    )
    assert [(n.operator, n.cost.read, n.cost.write, n.cost.vector) for n in made.nodes] == [
        ("aten.add", 2 * 24 * 4, 24 * 4, 24)
    ]
    copied = estimate(traced(lambda x: x.t().reshape(-1), torch.randn(4, 6)), "h100")
    assert [n.cost.bytes for n in copied.nodes] == [2 * 24 * 4], "a reshape that cannot be a view"
    squared = estimate(traced(lambda x: x * x, torch.randn(4, 6)), "h100").nodes[0]
    assert squared.cost.read == 4 * 6 * 4, "one tensor, used twice, is read once"
    expanded = estimate(traced(lambda x, y: x + y.expand(4, 6), torch.randn(4, 6), torch.randn(6)), "h100").nodes[0]
    assert expanded.cost.read == (24 + 6) * 4
    assert (
        estimate(
            traced(
                lambda t, i: torch.nn.functional.embedding(i, t),
                torch.randn(1000, 8),
                torch.zeros(5, dtype=torch.int64),
            ),
            "h100",
        )
        .nodes[0]
        .cost.read
        == 5 * 8 * 4 + 5 * 8
    ), "rows that are asked for"


@pytest.mark.parametrize(
    "function, shapes, flops",
    [
        (lambda a, c: a @ c, [(4, 5), (5, 6)], 2 * 4 * 5 * 6),
        (lambda a, c: a @ c, [(2, 3, 4, 5), (2, 3, 5, 6)], 2 * 6 * 4 * 5 * 6),
        (torch.nn.functional.linear, [(2, 4, 5), (7, 5), (7,)], 2 * 8 * 5 * 7),
        (lambda a, c: torch.einsum("bsh,vh->bsv", a, c), [(2, 3, 4), (5, 4)], 2 * 2 * 3 * 4 * 5),
        (torch.addmm, [(6,), (4, 5), (5, 6)], 2 * 4 * 5 * 6),
        (torch.nn.functional.conv2d, [(1, 3, 8, 8), (5, 3, 3, 3)], 2 * 5 * 36 * 27),
        (torch.baddbmm, [(2, 4, 6), (2, 4, 5), (2, 5, 6)], 2 * 2 * 4 * 5 * 6),
    ],
)
@pytest.mark.parametrize("pre_dispatch", [True, False])
def test_products(function, shapes, flops, pre_dispatch):
    args = [torch.randn(*shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        function(*args)
    assert counter.get_total_flops() == flops
    assert estimate(traced(function, *args, pre_dispatch=pre_dispatch), "h100").flops == flops


def test_a_dynamic_graph_is_evaluated_for_other_sizes_without_tracing():
    model = Block()
    gm = traced(lambda x: model(x), torch.randn(3, 128, 64), mode="symbolic")
    made = estimate(gm, "ascend910b2", fused=True)
    batch, seq = sorted(made.sizes, key=lambda k: made.sizes[k])
    assert (
        made.flops.free_symbols == {batch, seq} and made.value(made.flops) == 24 * 3 * 128 * 64**2 + 4 * 3 * 128**2 * 64
    )
    other = made.at(**{str(batch): 5, str(seq): 512})
    fixed = estimate(traced(model, torch.randn(5, 512, 64)), "ascend910b2", fused=True)
    assert other.value(other.flops) == fixed.flops and other.value(other.bytes) == fixed.bytes
    assert other.seconds == pytest.approx(fixed.seconds) != pytest.approx(made.seconds)
    assert (
        other.expression("flops", {"b": 5, "s": 512, "h": 64, "3*h": 192, "4*h": 256, "h/4": 16})
        == 24 * b * s * h**2 + 4 * b * s**2 * h
    )
    with pytest.raises(KeyError, match="no size"):
        made.at(zz=3)


def test_sizes_known_only_at_run_time_are_named():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(8, 4))
        gm = make_fx(lambda x: torch.nonzero(x) * 2, tracing_mode="real")(x)
    made = estimate(gm, "h100")
    assert any("known only at run time" in n for n in made.notes)
    name = next(n for n in made.notes if "run time" in n).split(":")[0]
    assert made.at(**{name: 7}).value(made.at(**{name: 7}).bytes) > made.value(made.bytes)


def test_a_chain_is_one_kernel_that_writes_its_end():
    def chain(x, y):
        z = torch.sigmoid(x) * y
        return (z + 1).exp()

    gm, size = traced(chain, torch.randn(64, 64), torch.randn(64, 64)), 64 * 64 * 4
    apart, one = estimate(gm, "h100"), estimate(gm, "h100", fused=True)
    assert [n.cost.bytes for n in one.nodes] == [3 * size] and len(one.nodes[0].members) == 4 == len(apart.nodes)
    assert apart.bytes == (2 + 3 + 2 + 2) * size and apart.vector == one.vector and one.kernels == 1


def test_what_is_used_outside_is_written_and_products_are_barriers():
    def model(x, w):
        a = x + 1
        return torch.relu(a) + (a @ w).sigmoid(), a

    size = 64 * 64 * 4
    nodes = estimate(traced(model, torch.randn(64, 64), torch.randn(64, 64)), "h100", fused=True).nodes
    assert [(n.operator, n.cost.read, n.cost.write) for n in nodes if not n.members][-1] == ("aten.mm", 2 * size, size)
    first, last = (n for n in nodes if n.operator != "aten.mm")
    assert (first.cost.read, first.cost.write) == (size, 2 * size), "a and relu(a), which waits for the product"
    assert (last.cost.read, last.cost.write) == (2 * size, size)


def test_softmax_is_one_kernel_and_a_sum_over_rows_computes_its_input_again():
    def model(x, g):
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True), (x * g).sum(0)

    size = 32 * 64 * 4
    nodes = estimate(traced(model, torch.randn(32, 64), torch.randn(32, 64)), "h100", fused=True).nodes
    rows, columns = (n for n in nodes if n.cost.bytes)
    assert (rows.cost.read, rows.cost.write) == (size, size)
    assert (columns.operator, columns.cost.read, columns.cost.write) == ("aten.sum", 2 * size, 64 * 4)


def test_fused_never_moves_more():
    model, x = Block(), torch.randn(2, 32, 64, requires_grad=True)
    gm = traced(lambda x, *p: torch.autograd.grad(model(x).sum(), (x, *model.parameters())), x)
    apart, one = estimate(gm, "ascend910b2"), estimate(gm, "ascend910b2", fused=True)
    assert one.bytes < 0.75 * apart.bytes and one.seconds < apart.seconds and one.flops == apart.flops


def test_operators_of_ours_have_the_cost_of_their_file():
    from mindspeed_fx.kernels import REGISTRY

    x, w = torch.randn(4, 64), torch.randn(64)
    node = estimate(traced(lambda x, w: torch.ops.mindspeed.rms_norm(x, w, 1e-5, True)[0], x, w), "h100").nodes[0]
    assert node.operator == "mindspeed.rms_norm" and node.cost.once and node.cost.read == (4 * 64 + 64) * 4
    operator = REGISTRY[torch.ops.mindspeed.rms_norm.default]
    kept, operator.cost = operator.cost, None
    try:
        assert any(
            "has no cost" in n
            for n in estimate(
                traced(lambda x, w: torch.ops.mindspeed.rms_norm(x, w, 1e-5, True)[0], x, w), "h100"
            ).notes
        )
    finally:
        operator.cost = kept


def test_foreign_operators_are_named():
    with torch.library._scoped_library("cost_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("cost_test::twice", torch.empty_like, lib=library)
        made = estimate(traced(torch.ops.cost_test.twice, torch.randn(4, 4)), "h100")
    assert made.bytes == 2 * 64 and any("cost_test.twice is not known" in n for n in made.notes)


def test_collectives_take_the_time_of_their_group():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    try:
        group = dist.new_group([0, 8])
        x = torch.randn(128, 64)
        made = estimate(
            traced(
                lambda x: (
                    torch.ops._c10d_functional.wait_tensor(
                        torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group.group_name)
                    )
                    * 2
                ),
                x,
            ),
            "h100",
        )
    finally:
        dist.destroy_process_group()
    node = made.nodes[0]
    assert node.bound == "network" and made.network_seconds == node.seconds
    assert node.seconds == pytest.approx(
        collective_seconds("all_gather", 2 * 128 * 64 * 4, 2, "h100", ranks_per_node=1)
    ), "ranks 0 and 8 are in two machines"


def test_a_checkpointed_region_is_looked_into():
    from torch.utils.checkpoint import checkpoint

    from mindspeed_fx import backend

    seen, lin = [], torch.nn.Linear(16, 16, bias=False)
    original = backend.capture

    def capture(gm):
        made = original(gm)
        seen.append(estimate(made, "h100"))
        return made

    backend.capture = capture
    try:
        torch.compile(
            lambda x: checkpoint(lambda x: torch.relu(lin(x)), x, use_reentrant=False) + lin(x),
            backend="mindspeed",
            options={"codegen": "eager"},
        )(torch.randn(4, 16, requires_grad=True))
    finally:
        backend.capture = original
    assert seen[0].flops == 2 * 2 * 4 * 16 * 16


def test_types_without_a_rate_and_nodes_without_values_are_named():
    x = torch.randn(8, 8, dtype=torch.float64)
    gm = traced(lambda x: x @ x + 1, x)
    assert any("float64" in n for n in estimate(gm, "ascend910b2").notes) and not estimate(gm, "h100").notes
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    assert estimate(gm, "h100").notes == ["2 nodes without fake values are not counted"]


def test_names_must_tell_sizes_apart():
    made = estimate(traced(Block(), torch.randn(3, 128, 64)), "h100")
    with pytest.raises(ValueError, match="both 64"):
        made.expression("flops", {"s": 64, "h": 64})
    with pytest.raises(ValueError, match="larger"):
        made.expression("flops", {"b": 1})
    with pytest.raises(ValueError, match="no total"):
        made.expression("time", {"b": 3})


def test_npu_attention_layouts_cost_the_same():
    from mindspeed_fx.cost import aten as costs
    from mindspeed_fx.cost.operators import Spec

    make = lambda *shape: Spec(shape, "bfloat16", 2)  # noqa: E731
    bnsd = costs.cost(
        "npu_fusion_attention_v3",
        make(2, 8, 128, 64),
        (make(2, 8, 128, 64), make(2, 2, 128, 64), make(2, 2, 128, 64), 8, "BNSD"),
        {"sparse_mode": 3},
    )
    sbh = costs.cost(
        "npu_fusion_attention_v3",
        make(128, 2, 512),
        (make(128, 2, 512), make(128, 2, 128), make(128, 2, 128), 8, "SBH"),
        {"sparse_mode": 3},
    )
    tnd = costs.cost(
        "npu_fusion_attention_v3",
        make(256, 8, 64),
        (make(256, 8, 64), make(256, 2, 64), make(256, 2, 64), 8, "TND"),
        {"sparse_mode": 0},
    )
    assert bnsd.flops == sbh.flops == 4 * 2 * 8 * 128 * 128 * 64 and bnsd.matrix == sbh.matrix < bnsd.flops
    assert tnd.matrix == tnd.flops == 4 * 8 * 256 * 256 * 64


def test_text_and_json():
    import json

    made = estimate(traced(Block(), torch.randn(3, 128, 64)), "ascend910b2")
    assert "modelled on ascend910b2" in str(made) and "aten.mm" in str(made) and json.dumps(made.summary())
    seconds = [r["seconds"] for r in made.by_operator()]
    assert sum(seconds) == pytest.approx(made.seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert made.on("ascend910b4").seconds > made.seconds and hardware("ascend910b4").name in str(made.on("ascend910b4"))


def test_a_large_cache_serves_what_the_last_kernel_left():
    hw, model = hardware("ascend910b2"), lambda x: (x + 1).exp()  # noqa: E731

    def memory_seconds(rows):
        first, second = estimate(traced(model, torch.empty(rows, 2**18, device="meta")), hw).nodes
        assert first.cost.bytes == second.cost.bytes
        return first.seconds - hw.launch, second.seconds - hw.launch

    small, again = memory_seconds(64)  # 64 MiB each, two fit
    assert small == pytest.approx(2 * 2**26 / hw.memory_rate) and again == pytest.approx(
        2**26 / hw.memory_rate + 2**26 / hw.cache_rate
    )
    large, again = memory_seconds(256)
    assert large == again == pytest.approx(2 * 2**28 / hw.memory_rate), "256 MiB do not fit"
    assert hw.cache_rate > 2 * hw.memory_rate and hardware("h100").cache_bandwidth is None


@pytest.mark.parametrize("device", ["ascend910b2", "h100"])
def test_equal_calls_are_priced_once(device, monkeypatch):
    """Layers repeat; what they cost does not depend on whether that was noticed, nor does one tensor read twice count
    twice.
    """

    def layers(x, w):
        for _ in range(3):
            x = torch.softmax(x * x + x, -1) @ w + (x * w)
        return x, x.sum(0), x.sum(1)

    gm = traced(layers, torch.empty(64, 64), torch.empty(64, 64))
    calls = []
    monkeypatch.setattr(
        graph.Estimate, "_node", lambda self, *args, own=graph.Estimate._node: calls.append(args) or own(self, *args)
    )
    noticed, few = estimate(gm, device).nodes, len(calls)
    monkeypatch.setattr(graph, "_alike", lambda call: object())
    assert noticed == estimate(gm, device).nodes and few < len(noticed) == len(calls) - few


def test_the_cache_forgets_what_was_used_longest_ago():
    from mindspeed_fx.cost.cache import Cache
    from mindspeed_fx.cost.operators import Spec
    from mindspeed_fx.cost.read import Call

    make = lambda key: Spec((60 * 2**20,), "int8", 1, key=key)  # noqa: E731
    cache = Cache(hardware("ascend910b2"))
    touch = lambda read, write: cache.touch([Call("c", "aten.neg", "pointwise", make(write), (make(read),), {})], int)  # noqa: E731
    assert touch("a", "b") == 0 and touch("a", "c") == 60 * 2**20
    assert touch("a", "d") == 60 * 2**20, "a, c, d are left of 192 MiB"
    assert touch("b", "e") == 0 and touch("d", "f") == 60 * 2**20


def test_npu_linear_losses_cost_their_products():
    """Logits once forward; again, and both gradients of them, backward."""
    from mindspeed_fx.cost import aten as costs
    from mindspeed_fx.cost.operators import Spec

    make = lambda *shape, dtype="bfloat16": Spec(shape, dtype, 4 if dtype == "float32" else 2)  # noqa: E731
    x, weight, one, target = make(64, 32), make(1000, 32), make(64, dtype="float32"), make(64, dtype="float32")
    forward = costs.cost("npu_fused_linear_online_max_sum", [one] * 5, (x, weight, target, 0, 999), {})
    backward = costs.cost(
        "npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
        [x, weight],
        (one, x, weight, one, target, 0.0, one, one),
        {},
    )
    assert forward.flops == 2 * 64 * 1000 * 32 and backward.flops == 3 * forward.flops
    assert forward.bytes < 64 * 1000 * 2 and backward.bytes < 64 * 1000 * 2 + 4 * weight.bytes


def test_an_operator_that_writes_its_argument_costs_its_product():
    """Megatron's gradients of weights are such: a functional graph hides them behind ``auto_functionalized``."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
    from torch._subclasses.fake_tensor import FakeTensorMode

    import mindspeed_fx.megatron.main_grad  # noqa: F401  registers the operator

    gm = torch.fx.GraphModule({}, torch.fx.Graph())
    with FakeTensorMode():
        values = [torch.empty(6, 4), torch.empty(10, 6, dtype=torch.bfloat16), torch.empty(10, 4, dtype=torch.bfloat16)]
    buffer, grad, x = (gm.graph.placeholder(name) for name in ("buffer", "grad", "x"))
    for node, value in zip((buffer, grad, x), values, strict=True):
        node.meta["val"] = value
    arguments = {"grad": grad, "x": x, "key": -1, "_main_grad_base_index": 0, "_all_bases": [buffer]}
    call = gm.graph.call_function(auto_functionalized_v2, (torch.ops.mindspeed.add_to_main_grad.default,), arguments)
    call.meta["val"] = (None, values[0])
    result = gm.graph.call_function(operator.getitem, (call, 1))
    result.meta["val"] = values[0]
    gm.graph.output((result,))
    made = estimate(gm, "ascend910b2")
    assert made.flops == 2 * 10 * 6 * 4 and not any("not looked into" in note for note in made.notes)
