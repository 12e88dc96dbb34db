"""Passes, operators and devices of the user's own, and what is missing or not tried on a machine."""

from __future__ import annotations

import json
import sys

import torch
import torch.fx as fx

import mindspeed_fx
from mindspeed_fx import passes
from mindspeed_fx.cost import calibrated
from mindspeed_fx.cost.device import Constant
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.kernels import base as kernels
from mindspeed_fx.megatron.flags import FlagError
from mindspeed_fx.options import Options
from mindspeed_fx.passes import PassError, PassReport
from mindspeed_fx.passes.runner import Pipeline
from tests.errors.models import Model, X, plain
from tests.errors.runner import file, folder, row, table

NAN = float("nan")


# --------------------------------------------------------------------------- passes


def nothing(gm: fx.GraphModule, context: object) -> PassReport:
    return PassReport("mine.own")


def register(name="mine.own", run=nothing, **more):
    """Registers, and forgets again what was taken."""

    def call():
        try:
            passes.register(name, **{"stage": "captured", **more})(run)
        finally:
            if name in [p.name for p in passes.registered()] and name == "mine.own":
                passes.unregister(name)

    return call


def ordered(**more):
    """The order of all passes beside one of the user's."""

    def call():
        passes.register("mine.own", stage="captured", **more)(nothing)
        try:
            Pipeline(Options())
        finally:
            passes.unregister("mine.own")

    return call


def circle():
    passes.register("mine.own", stage="captured", before="mine.other")(nothing)
    passes.register("mine.other", stage="captured", before="mine.own")(nothing)
    try:
        Pipeline(Options())
    finally:
        passes.unregister("mine.own")
        passes.unregister("mine.other")


def run_pass(run, stage="captured", **options):
    """Compiles a tiny step with a pass of the user's own."""

    def call():
        passes.register("mine.own", stage=stage, level=0)(run)
        try:
            mindspeed_fx.compile(Model(), options={"codegen": "eager", "level": 0, **options})(X).backward()
        finally:
            passes.unregister("mine.own")
            torch._dynamo.reset()

    return call


def drops_the_result(gm, context):
    output = gm.graph.output_node()
    output.args = ((),)
    gm.recompile()
    return PassReport("mine.own")


def uses_before_making(gm, context):
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    nodes[0].args = (nodes[-1], *nodes[0].args[1:])
    return PassReport("mine.own")


def doubles(gm, context):
    node = next(n for n in reversed(gm.graph.nodes) if n.op == "call_function")
    with gm.graph.inserting_after(node):
        twice = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
    twice.meta = dict(node.meta)
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    gm.recompile()
    return PassReport("mine.own", rewrites=[passes.site("doubled", node)])


PASSES = [
    *[
        row(f"register: name {n!r}", register(n), repr(n), "family.name", error=PassError)
        for n in ("own", "Mine.own", "mine.", "mine own", "", None, 3)
    ],
    row("register: a name that is taken", register("fusion.rope"), '"fusion.rope"', "replace=True", error=PassError),
    row("register: no stage", register(stage=None), "stage None", "captured", error=PassError),
    row("register: unknown stage", register(stage="capture"), "'capture'", 'did you mean "captured"', error=PassError),
    row("register: level 4", register(level=4), "level 4", "0, 1, 2", error=PassError),
    row("register: level True", register(level=True), "level True", "0, 1, 2", error=PassError),
    row("register: level a text", register(level="1"), "level '1'", "0, 1, 2", error=PassError),
    row("register: exact", register(exact="yes"), "exact 'yes'", "True or False", error=PassError),
    row("register: replace", register(replace="yes"), "replace 'yes'", "True or False", error=PassError),
    row("register: before a number", register(before=3), "before 3", "names of passes", error=PassError),
    row("register: no function", register(run=None), '"mine.own"', "None", "function", error=PassError),
    row("register: a function of one argument", register(run=lambda gm: None), "context", error=PassError),
    row("order: before no pass", ordered(before="fusion.ropes"), '"fusion.ropes"', "fusion.rope", error=PassError),
    row(
        "order: after another stage",
        ordered(after="overlap.schedule"),
        '"overlap.schedule"',
        "partitioned",
        error=PassError,
    ),
    row("order: before itself", ordered(before="mine.own"), "mine.own", "circle", error=PassError),
    row("order: a circle", circle, "circle", "mine.other", error=PassError),
    row("unregister: no pass", lambda: passes.unregister("mine.on"), '"mine.on"', error=PassError),
    row(
        "a pass returns nothing",
        run_pass(lambda gm, context: None),
        '"mine.own"',
        "None",
        "PassReport",
        error=PassError,
    ),
    row(
        "a pass reports another",
        run_pass(lambda gm, context: PassReport("mine.other")),
        '"mine.own"',
        '"mine.other"',
        error=PassError,
    ),
    row("a pass drops the result", run_pass(drops_the_result), '"mine.own"', "output", error=PassError),
    row("a pass breaks the order", run_pass(uses_before_making), '"mine.own"', error=PassError),
    row("a pass fails", run_pass(lambda gm, context: {}["x"]), '"mine.own"', "KeyError", error=PassError),
    row("a pass changes values", run_pass(doubles, check="each"), '"mine.own"', error=AssertionError),
    row(
        "a pass decides of nothing",
        run_pass(lambda gm, context: PassReport("mine.own", saved=["nothing"]), stage="partition"),
        '"mine.own"',
        "nothing",
        error=PassError,
    ),
]


# --------------------------------------------------------------------------- operators


def define(schema="errors_own(Tensor x) -> Tensor", fake=torch.empty_like, reference=plain, **more):
    return lambda: kernels.operator(schema, fake, **more)(reference)


def lower(target="npu", kernel="mine", supports=lambda x: None, build=plain):
    def call():
        operator = kernels.Operator(torch.ops.aten.relu.default, plain)
        operator.lower(target)(kernel, supports)(build)

    return call


OPERATORS = [
    row("operator: no schema", define(None), "schema is None", "(Tensor x"),
    row("operator: a name alone", define("own"), "'own'", "(Tensor x"),
    row("operator: torn schema", define("own(Tensor x"), "'own(Tensor x'", "(Tensor x, ...) -> ..."),
    row("operator: unknown type", define("own(Tenser x) -> Tensor"), "own(Tenser x)"),
    row("operator: another namespace", define("mine::own(Tensor x) -> Tensor"), "mine::own"),
    row("operator: a name that is taken", define("rms_norm(Tensor x) -> Tensor"), "rms_norm", "already"),
    row("operator: no fake", define(fake=None), "fake is None", "function"),
    row("operator: no reference", define(reference=3), "3", "function"),
    row("operator: unknown tag", define(tags=("activations",)), "'activations'", 'did you mean "activation"'),
    row("operator: tags of a text", define(tags="norm"), "tags is 'norm'", "tuple"),
    row("operator: opaque", define(opaque="yes"), "opaque is 'yes'", "True or False"),
    row("lower: unknown target", lower("ascend"), "'ascend'", "npu", "cuda"),
    row("lower: no kernel's name", lower(kernel=None), "kernel is None"),
    row("lower: supports", lower(supports=True), "supports is True", "function"),
    row("lower: no function", lower(build=None), "None", "function"),
]


# --------------------------------------------------------------------------- devices


def calibrated_table(**more):
    """The file of a table with other values."""
    constant = {"value": 1e-6, "unit": "s", "source": "here", "confidence": "high", "spread": None}
    values = {
        "format": 1, "target": "cpu", "device": "here", "base": "cpu", "constants": {"launch": constant},
        "fitted": ["launch"], "node": 1, "note": "",
    }  # fmt: skip
    values.update(more)
    return lambda: calibrated.read(file("table.json", json.dumps(values)))


def constants(**values):
    return calibrated_table(
        constants={"launch": {"value": 1e-6, "unit": "s", "source": "here", "confidence": "high", **values}}
    )


def measured(**values):
    one = {"operator": "product", "dtype": "float32", "sizes": [64] * 3, "seconds": 1e-6, "source": "here"}
    return calibrated_table(measured=[{**one, **values}])


TABLES = [
    row("table: not there", lambda: calibrated.read("table.json"), "table.json", error=FileNotFoundError),
    row("table: a directory", lambda: calibrated.read(folder("table.json")), "table.json", error=IsADirectoryError),
    row(
        "table: empty",
        lambda: calibrated.read(file("table.json")),
        "table.json",
        "mindspeed-fx calibrate",
        error=ValueError,
    ),
    row(
        "table: torn",
        lambda: calibrated.read(file("table.json", '{"format": 1, "targ')),
        "table.json",
        "mindspeed-fx calibrate",
        error=ValueError,
    ),
    row(
        "table: bytes",
        lambda: calibrated.read(file("table.json", b"\xff\x00")),
        "table.json",
        "mindspeed-fx calibrate",
        error=ValueError,
    ),
    row(
        "table: a list",
        lambda: calibrated.read(file("table.json", "[]")),
        "table.json",
        "mindspeed-fx calibrate",
        error=ValueError,
    ),
    row("table: another version", calibrated_table(format=2), "table.json", "another version", error=ValueError),
    row("table: unknown key", calibrated_table(colour="red"), "table.json", "colour", error=ValueError),
    row(
        "table: constants are missing",
        calibrated_table(constants=None),
        "table.json",
        "mindspeed-fx calibrate",
        error=ValueError,
    ),
    row(
        "table: a constant without unit",
        calibrated_table(constants={"launch": {"value": 1.0}}),
        "table.json",
        error=ValueError,
    ),
    row("table: a text for a number", constants(value="fast"), "table.json", "fast", error=ValueError),
    row("table: negative", constants(value=-1.0), "table.json", "-1.0", error=ValueError),
    row("table: NaN", constants(value=NAN), "table.json", "nan", error=ValueError),
    row("table: 0 ranks of a machine", calibrated_table(node=0), "table.json", "node", error=ValueError),
    row("table: a measured kernel of no size", measured(sizes=[64, 64]), "table.json", "m, n, k", error=ValueError),
    row("table: a size of 0", measured(sizes=[64, 64, 0]), "table.json", "from 1 on", error=ValueError),
    row("table: a size too large", measured(sizes=[64, 64, 2**99]), "table.json", "product", error=ValueError),
    row("table: a text for sizes", measured(sizes="64 x 64 x 64"), "table.json", "product", error=ValueError),
    row("table: unknown operator", measured(operator="prodct"), "table.json", "attention_backward", error=ValueError),
    row("table: a kernel of no time", measured(seconds=0), "table.json", "above 0", error=ValueError),
    row("table: a kernel of NaN seconds", measured(seconds=NAN), "table.json", "nan", error=ValueError),
    row("table: a kernel's unknown key", measured(speed=1), "table.json", "speed", error=ValueError),
    row("table: a number for kernels", calibrated_table(measured=1), "table.json", error=ValueError),
    row("table: unknown target", calibrated_table(target="tpu"), "table.json", "'tpu'", error=ValueError),
    row(
        "table: a constant of no device",
        lambda: calibrated.with_constants(hardware("cpu"), {"lanch": Constant(1.0, "s", "here", "high")}),
        "'lanch'",
        "launch",
        error=ValueError,
    ),
    row(
        "table: a calibrated name that is gone",
        lambda: hardware("cpu-calibrated-00000000"),
        "'cpu-calibrated-00000000'",
        "cpu",
    ),
]


# --------------------------------------------------------------------------- machines


def without_compiler(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder("cache"))
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        return mindspeed_fx.compile(lambda x: (x * 2).sin() + 1, options={"codegen": "inductor"})(torch.ones(7))


def without_c_compiler(monkeypatch):
    from mindspeed_fx.ascend import stub

    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(stub.elf, "read_needed", lambda path: ([], []))
    import pathlib

    stub._link(pathlib.Path("."), "libascendcl.so", "stub.c", [])


def adaptor(version):
    """Megatron's adaptor beside a Megatron-core of this version."""

    def call(monkeypatch):
        from mindspeed_fx import megatron

        monkeypatch.setattr(megatron, "_version", lambda: version)
        monkeypatch.setattr(megatron.patches, "applied", lambda: [])
        megatron.apply()

    return call


def variable(name: str, value: str, call):
    def run(monkeypatch):
        monkeypatch.setenv(name, value)
        return call()

    return run


def wants_compile():
    from mindspeed_fx.megatron.training.compile_chunks import wants_compile

    return wants_compile()


def explain_flags(*words):
    def call():
        from mindspeed_fx.megatron import flags

        return flags.explain(list(words))

    return call


def apply_flags(**arguments):
    def call():
        import argparse

        from mindspeed_fx.megatron import flags

        parser = flags.add_arguments(argparse.ArgumentParser())
        parsed = parser.parse_args([])
        for name, value in arguments.items():
            setattr(parsed, name, value)
        flags.apply(parsed, [f"--{name.replace('_', '-')}" for name in arguments])

    return call


def replaced(monkeypatch):
    """A package that puts a pass-through in the place of torch.compile, before ours is imported."""
    import importlib

    from mindspeed_fx import torch_compile

    monkeypatch.setattr(torch, "compile", lambda model=None, **kwargs: model)
    monkeypatch.setitem(sys.modules, "mindspeed_fx.torch_compile", torch_compile)
    spec = importlib.util.find_spec("mindspeed_fx.torch_compile")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def npu(**options):
    return lambda: mindspeed_fx.compile(Model(), options={"target": "npu", **options})(X)


MACHINES = [
    row("no C++ compiler", without_compiler, "no-such-compiler", "CXX", '"eager"'),
    row("no C compiler for the stand-in of CANN", without_c_compiler, "no-such-compiler", "CC", error=OSError),
    row("no torch_npu for npugraph_ex", npu(codegen="npugraph_ex"), '"npugraph_ex"', "torch_npu"),
    row(
        "torch.compile is another's",
        replaced,
        "torch.compile has been replaced",
        "MINDSPEED_FX_RESTORE_COMPILE=1",
        error=RuntimeError,
    ),
    row("Megatron is missing", adaptor(None), "megatron-core 0.16", "pip install", error=ImportError),
    row("Megatron of another version", adaptor("0.12.1"), "megatron-core 0.16", "0.12.1", error=ImportError),
    row("Megatron of no version", adaptor("unknown"), "megatron-core 0.16", "unknown", error=ImportError),
    row(
        "MINDSPEED_FX_COMPILE",
        variable("MINDSPEED_FX_COMPILE", "yes", wants_compile),
        "MINDSPEED_FX_COMPILE='yes'",
        "0 or 1",
        error=ValueError,
    ),
    row(
        "MINDSPEED_FX_SKIP_FLAGS",
        variable("MINDSPEED_FX_SKIP_FLAGS", "swap-atention", explain_flags()),
        "swap-atention",
        "--swap-attention",
    ),
    row(
        "flags: a value that is none",
        explain_flags("--context-parallel-algo", "rong"),
        "--context-parallel-algo",
        "'rong'",
    ),
    row(
        "flags: a text",
        lambda: explain_flags()() or __import__("mindspeed_fx.megatron.flags").megatron.flags.explain("--num-layers 4"),
        "'--num-layers 4'",
        "list",
    ),
    row("flags: what is not done here", apply_flags(tp_2d=True), "--tp-2d", "--mindspeed-skip-flags", error=FlagError),
]

ROWS = PASSES + OPERATORS + TABLES + MACHINES

test_extensions = table(ROWS)
