"""Order, contracts and checks of passes."""

import pathlib

import pytest
import torch

from mindspeed_fx import passes
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.passes import manager, runner
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.check import CheckError
from mindspeed_fx.passes.runner import Pipeline
from tests.models import explain

aten = torch.ops.aten


@pytest.fixture
def register():
    names = []

    def add(name, run, **declared):
        names.append(name)
        passes.register(name, **{"stage": "captured", **declared})(run)

    yield add
    for name in names:
        passes.unregister(name)


def nothing(gm, context):
    """Does nothing."""
    return passes.PassReport("x")


def order():
    return [p.name for p in Pipeline(Options(enable=["*"])).passes]


def test_the_list_is_the_order():
    """Every pass of the package is a row of the list and every row a pass, and they run in the order of the rows."""
    assert order() == [row.name for row in manager.PASSES]
    stages = [manager.STAGES.index(row.stage) for row in manager.PASSES]
    assert stages == sorted(stages) and all(row.why for row in manager.PASSES)


def test_a_users_pass_runs_last_in_its_stage_or_where_it_says(register):
    register("mine.last", nothing)
    register("mine.first", nothing, before=manager.PASSES[0].name)
    register("mine.between", nothing, after="fusion.rms_norm", before=("fusion.rope", "mine.last"))
    found = order()
    assert found[0] == "mine.first" and found[found.index("fusion.rope") - 1] == "mine.between"
    assert found.index("mine.last") == found.index("sharding.token_dispatch") + 1
    assert [n for n in found if not n.startswith("mine.")] == [row.name for row in manager.PASSES]


def test_a_place_beside_a_pass_that_is_off_holds(register):
    register("mine.between", nothing, after="fusion.rms_norm", before="fusion.rope")
    names = [p.name for p in Pipeline(Options(disable=["fusion.rms_norm", "fusion.rope"])).passes]
    assert names.index("fusion.one_hot_dispatch") < names.index("mine.between") < names.index("fusion.add_layer_norm")


@pytest.mark.parametrize("declared, word", [
    ({"before": "fusion.rms_nrm"}, '"a.x" goes before "fusion.rms_nrm", and there is no such pass.*"fusion.rms_norm"'),
    ({"after": "overlap.bucket"}, 'of stage "captured" goes after "overlap.bucket", which is of stage "partitioned"'),
    ({"after": "fusion.rope", "before": "fusion.rms_norm"}, "circle: .*a.x"),
])  # fmt: skip
def test_a_place_that_cannot_be_is_an_error_before_anything_runs(register, declared, word):
    register("a.x", nothing, **declared)
    with pytest.raises(passes.PassError, match=word):
        Pipeline(Options())


@pytest.mark.parametrize(
    "name, declared, word",
    [
        ("nodot", {}, "family.name"),
        ("a.b", {"stage": "late"}, "captured, joint, partition, partitioned, lowered"),
        ("a.b", {"level": 7}, "0, 1, 2"),
        ("fusion.rope", {}, "registered already"),
    ],
)
def test_bad_declarations(name, declared, word):
    with pytest.raises(passes.PassError, match=word):
        passes.register(name, **{"stage": "captured", **declared})(nothing)


def test_a_users_pass_runs_and_is_reported(register):
    def relu_to_silu(gm, context):
        """Replaces relu."""
        report = passes.PassReport("mine.relu")
        for node in passes.calls(gm, aten.relu.default):
            node.target = aten.silu.default
            report.rewrites.append(passes.site("silu", node))
        gm.recompile()
        return report

    register("mine.relu", relu_to_silu)
    x = torch.randn(4)
    assert torch.equal(
        torch.compile(torch.relu, backend="mindspeed", options={"codegen": "eager"})(x), torch.nn.functional.silu(x)
    )
    torch._dynamo.reset()
    assert explain(torch.relu, x).counts["mine.relu"] == 1


@pytest.mark.parametrize("stage, side", [("joint", "joint"), ("partitioned", "forward"), ("lowered", "forward")])
def test_later_stages_see_their_graphs(register, stage, side):
    seen = []

    def look(gm, context):
        """Looks."""
        seen.append(context.side)
        return passes.PassReport("mine.look")

    register("mine.look", look, stage=stage)
    explain(torch.nn.Linear(4, 4), torch.randn(2, 4))
    assert side in seen and ("backward" in seen) == (stage != "joint")


def change_output(gm, context):
    """Casts the output."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    last = output.args[0][0]
    with gm.graph.inserting_before(output):
        cast = gm.graph.call_function(aten.to.dtype, (last, torch.float64))
    cast.meta["val"] = last.meta["val"].double()
    output.args = ((cast,),)
    return passes.PassReport("bad.one")


def no_value(gm, context):
    """Adds a node without a value."""
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(first):
        gm.graph.call_function(aten.neg.default, (first,))
    return passes.PassReport("bad.one")


@pytest.mark.parametrize(
    "run, word",
    [
        (change_output, "changed output 0.*float32.*float64"),
        (no_value, "without a fake value"),
        (lambda gm, context: None, "returned NoneType"),
    ],
)
def test_a_pass_that_breaks_its_contract_is_named(register, run, word):
    register("bad.one", run)
    with pytest.raises(Exception, match=f'pass "bad.one".*{word}'):
        torch.compile(lambda x: x + 1, backend="mindspeed", options={"codegen": "eager"})(torch.randn(2))


def wrong_sign(gm, context):
    """Turns the first subtraction into an addition."""
    report = passes.PassReport("wrong.sign")
    for node in list(passes.calls(gm, aten.sub.Tensor))[:1]:
        node.target = aten.add.Tensor
        report.rewrites.append(passes.site("add", node))
    gm.recompile()
    return report


def off_by_rounding(gm, context):
    """(x + y) becomes (y + x + 0 * x): not wrong, not bitwise."""
    report = passes.PassReport("rounding.pass")
    for node in passes.calls(gm, aten.mean.dim):
        with gm.graph.inserting_before(node):
            total = gm.graph.call_function(aten.sum.dim_IntList, (node.args[0], node.args[1]))
            total.meta = dict(node.meta)
        node.target, node.args, node.kwargs = aten.mul.Tensor, (total, 1 / node.args[0].meta["val"].shape[-1]), {}
        report.rewrites.append(passes.site("sum", node))
    gm.recompile()
    return report


def test_check_names_the_wrong_pass(register):
    register("wrong.sign", wrong_sign)
    with pytest.raises(Exception, match='check: pass "wrong.sign".*output 0'):
        torch.compile(lambda x, y: (x - y).tanh(), backend="mindspeed", options={"codegen": "eager", "check": "each"})(
            torch.randn(3), torch.randn(3)
        )


def test_check_finds_a_lost_gradient(register):
    def detach(gm, context):
        """Detaches."""
        report = passes.PassReport("wrong.detach")
        for node in passes.calls(gm, aten.sin.default):
            with gm.graph.inserting_before(node):
                cut = gm.graph.call_function(aten.detach.default, (node.args[0],))
                cut.meta = dict(node.args[0].meta)
            node.args = (cut,)
            report.rewrites.append(passes.site("detach", node))
        gm.recompile()
        return report

    register("wrong.detach", detach)
    with pytest.raises(Exception, match='check: pass "wrong.detach".*gradient'):
        torch.compile(lambda x: x.sin() + x.cos(), backend="mindspeed", options={"codegen": "eager", "check": "each"})(
            torch.randn(3, requires_grad=True)
        )


def test_exact_passes_are_held_to_the_bit(register):
    f = lambda x: x.mean(-1)  # noqa: E731
    x = torch.randn(7, 1001)
    register("rounding.pass", off_by_rounding)
    torch.compile(f, backend="mindspeed", options={"codegen": "eager", "check": "each"})(x)
    passes.register("rounding.pass", stage="captured", exact=True, replace=True)(off_by_rounding)
    torch._dynamo.reset()
    with pytest.raises(Exception, match='"rounding.pass" is declared exact and is off by'):
        torch.compile(f, backend="mindspeed", options={"codegen": "eager", "check": "each"})(x)


def test_check_passes_what_is_right():
    from tests.models import Llama, tokens

    report = explain(Llama().bfloat16(), *tokens(), check="each")
    assert all(
        "worst relative error" in run.check
        for run in report.graphs[0].runs
        if manager.ROWS[run.report.name].stage != "partition"
    )
    assert issubclass(CheckError, AssertionError)


def test_bisector_finds_the_wrong_pass(register, monkeypatch):
    from torch._inductor.compiler_bisector import CompilerBisector

    # The bisector swaps the backend for others, which would not know our options: the environment carries them.
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", '{"codegen": "eager"}')
    register("wrong.sign", wrong_sign)
    x, y = torch.randn(3), torch.randn(3)

    def is_right():
        torch._dynamo.reset()
        f = lambda x, y: (x - y).tanh()  # noqa: E731
        return torch.allclose(torch.compile(f, backend="mindspeed")(x, y), f(x, y))

    found = CompilerBisector.do_bisect(is_right)
    assert found.backend == "mindspeed" and found.debug_info == "wrong.sign"


# ---------------------------------------------------------------- strict


def double_multiplications(gm, context):
    """(2x) for (x + x): fires where there is an addition of a value to itself."""
    report = passes.PassReport("mine.twice")
    for node in passes.calls(gm, aten.add.Tensor):
        if node.args[0] is node.args[1]:
            node.target, node.args = aten.mul.Tensor, (node.args[0], 2.0)
            report.rewrites.append(passes.site("twice", node))
    gm.recompile()
    return report


def trained(f, **options):
    x = torch.ones(4, 4, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(
        f, backend="mindspeed", options={"enable": ["mine.twice"], "strict": True, "codegen": "eager", **options}
    )(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("stage", ["captured", "joint", "partitioned"])
def test_strict_accepts_a_pass_that_fires(register, stage):
    register("mine.twice", double_multiplications, stage=stage)
    assert torch.equal(trained(lambda x: (x + x) * 3), torch.full((4, 4), 6.0))


def test_strict_waits_for_the_backward(register):
    """Only the backward has an addition of a value to itself: that of the two gradients of x."""

    def backward_alone(gm, context):
        report = double_multiplications(gm, context) if context.side == "backward" else passes.PassReport("mine.twice")
        report.rewrites = report.rewrites or [passes.site("seen", next(iter(gm.graph.nodes)))] * (
            context.side == "backward"
        )
        return report

    register("mine.twice", backward_alone, stage="partitioned")
    trained(lambda x: x.sin())
    with pytest.raises(Exception, match='strict: pass "mine.twice" was enabled by name and rewrote nothing'):
        with torch.no_grad():
            torch.compile(
                torch.sin, backend="mindspeed", options={"enable": ["mine.twice"], "strict": True, "codegen": "eager"}
            )(torch.ones(3))


def test_strict_fails_again_and_again(register, tmp_path, monkeypatch):
    """A graph that was refused is not in the compile caches."""
    register("mine.twice", double_multiplications)
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="rewrote nothing in graph"), torch.no_grad():
            torch.compile(torch.sin, backend="mindspeed", options={"enable": ["mine.twice"], "strict": True})(
                torch.ones(3)
            )


def test_strict_says_what_the_pass_noted(register):
    register("mine.twice", lambda gm, context: passes.PassReport("mine.twice").note_reason("nothing is added here"))
    with pytest.raises(Exception, match="rewrote nothing in graph [0-9]+: nothing is added here"):
        trained(torch.sin)


def test_a_contradiction_is_an_error_when_strict(register):
    register("mine.twice", nothing)
    Pipeline(Options(enable=["mine.twice"], disable=["mine.*"]))
    with pytest.raises(
        OptionError, match=r'"enable" names "mine.twice", which option "disable" turns off \(mine\.\*\)'
    ):
        Pipeline(Options(enable=["mine.twice"], disable=["mine.*"], strict=True))


def test_naming_a_pass_that_is_on_does_not_turn_it_off():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    assert (
        explain(model, torch.randn(4, 8), codegen="inductor", enable=["recompute.pointwise"], strict=True).counts[
            "recompute.pointwise"
        ]
        > 0
    )


# ---------------------------------------------------------------- contracts of stage "partition", and of regions


def changes_the_graph(gm, context):
    for node in passes.calls(gm, aten.sin.default):
        node.target = aten.cos.default
    return passes.PassReport("a.cut")


def saves_what_is_not_there(gm, context):
    report = passes.PassReport("a.cut")
    report.saved = ["nowhere"]
    return report


@pytest.mark.parametrize("run, word", [
    (lambda gm, context: None, "returned NoneType, not a PassReport"),
    (changes_the_graph, 'of stage "partition" changed the graph'),
    (saves_what_is_not_there, "saves what the joint graph does not have: nowhere"),
])  # fmt: skip
def test_a_cut_that_breaks_its_contract_is_named(register, run, word):
    register("a.cut", run, stage="partition")
    with pytest.raises(Exception, match=word) as error:
        trained(lambda x: (x + x).sin(), enable=[], strict=False)
    assert '"a.cut"' in str(error.value)


def test_a_region_is_validated_too(register):
    def forgets(gm, context):
        for node in passes.calls(gm, aten.sin.default):
            del node.meta["val"]
        return passes.PassReport("a.forgets")

    register("a.forgets", forgets)
    with pytest.raises(Exception, match='"a.forgets" left node .* without a fake value'):
        trained(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False), enable=[], strict=False)


def test_what_a_pass_of_the_package_breaks_unsaid_is_found_behind_its_stage(register, monkeypatch):
    def forgets(gm, context):
        for node in passes.calls(gm, aten.sin.default):
            del node.meta["val"]
        return passes.PassReport("a.forgets")

    register("a.forgets", forgets)
    monkeypatch.setattr(runner, "ROWS", {*runner.ROWS, "a.forgets"})
    with pytest.raises(Exception, match='a pass of stage "captured" left node .* without a fake value'):
        trained(lambda x: x.sin(), enable=[], strict=False)


def test_the_example_in_the_docs_rewrites():
    """docs/passes.md shows the pass of examples/custom_pass.py, whole, and it fires."""
    root = pathlib.Path(__file__).parents[2]
    shown = (root / "docs" / "passes.md").read_text().split("```python\n")[1].split("```")[0]
    assert shown.split("@passes.register")[1].strip() in (root / "examples" / "custom_pass.py").read_text()
    space: dict = {}
    try:
        exec(compile(shown, "docs/passes.md", "exec"), space)
        x = torch.randn(4, 4, requires_grad=True)
        report = explain(lambda x: (x * x + 1).log(), x)
        assert report.counts["mine.log1p"] == 1
    finally:
        passes.unregister("mine.log1p")


@pytest.mark.parametrize(
    "declared, word", [({"before": 1}, "before 1; it takes names"), ({"after": (1,)}, r"after \(1,\)")]
)
def test_places_are_names_of_passes(declared, word):
    with pytest.raises(passes.PassError, match=word):
        passes.register("a.b", stage="captured", **declared)


def test_an_object_that_can_be_called_is_a_pass(register):
    class Nothing:
        def __call__(self, gm, context):
            return passes.PassReport("a.object")

    register("a.object", Nothing())
    assert len(next(p for p in passes.registered() if p.name == "a.object").source_hash()) == 64


def test_only_generated_code_of_a_processor_is_left_to_inductor():
    given = [("cpu", "inductor", []), ("cuda", "inductor", []), ("cpu", "eager", []), ("cpu", "inductor", ["fusion.x"])]
    contexts = [
        Context(Options(target=target, codegen=codegen, enable=enable), "forward") for target, codegen, enable in given
    ]
    assert [c.left_to_inductor("fusion.x") for c in contexts] == [True, False, False, False]
