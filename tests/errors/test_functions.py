"""Public functions of the package: models, arguments, meshes, names and numbers that they cannot take."""

from __future__ import annotations

import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.planning.predict import Architecture, architecture, best_settings, settings, settings_from_flags
from mindspeed_fx.sharding.plan import Boundary, Plan
from mindspeed_fx.sharding.presets import named_plan
from tests.errors.models import Model, X, ranks
from tests.errors.runner import file, row, table

NAN = float("nan")
RUN = {"devices": 8, "sequence": 4096, "batch": 64}
ROWS_OVER_DP = {"dp": "S(0)"}
EDGE = Boundary(input=ROWS_OVER_DP)
FLAGS = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128"]


def on_mesh(call, *names: str, count: int = 2):
    """The call with a mesh of these names."""

    def run():
        with ranks(*names, count=count) as mesh:
            return call(mesh)

    return run


def divide(plan, *names: str, model=Model, count: int = 2, **more):
    return on_mesh(lambda mesh: mindspeed_fx.parallelize(model(), mesh, plan, **more), *names, count=count)


def divide_twice():
    with ranks("dp") as mesh:
        mindspeed_fx.parallelize(mindspeed_fx.parallelize(Model(), mesh, "zero2"), mesh, "zero2")


def stage(plan=None, model=Model, args=(X,), names=("pp",), **more):
    return on_mesh(lambda mesh: mindspeed_fx.pipeline_stage(model(), mesh, plan, args, **more), *names)


def simulate(*args, model=Model, mesh=None, plan="zero2", **more):
    return lambda: mindspeed_fx.simulate(model(), mesh or {"dp": 2}, plan, *(args or (X,)), **more)


def search(**more):
    given = {"args": (X,), "devices": 2, "hardware": "ascend910b2", **more}
    return lambda: mindspeed_fx.plan(given.pop("model", Model)(), **given)


NO_MIXTURE = Plan("experts", ("dp",), inputs={"*": {"dp": "S(0)"}}, experts={"dispatch": "all_to_all"})


def wide():
    return nn.Linear(2048, 2048)


def predict(model="llama3-8b", run=RUN, **more):
    return lambda: mindspeed_fx.predict(model, run, **more)


COMPILE = [
    row("compile: None", lambda: mindspeed_fx.compile(None), "compile: model is None", "module or function"),
    row("compile: a class", lambda: mindspeed_fx.compile(Model), "the class Model", "module or function"),
    row("compile: a text", lambda: mindspeed_fx.compile("model"), "'model'"),
    row(
        "compile: options that are a text", lambda: mindspeed_fx.compile(Model(), options="level"), "options is 'level'"
    ),
    row("compile: options that are a list", lambda: mindspeed_fx.compile(Model(), options=[1]), "options is [1]"),
    row("compile: fullgraph", lambda: mindspeed_fx.compile(Model(), fullgraph="yes"), "fullgraph is 'yes'", "True"),
    row("compile: dynamic", lambda: mindspeed_fx.compile(Model(), dynamic=2), "dynamic is 2", "None"),
    row("explain: a class", lambda: mindspeed_fx.explain(Model, X), "explain: model is the class Model"),
    row("explain: arguments", lambda: mindspeed_fx.explain(Model()), "missing a required argument: 'x'", "scale"),
    row("explain: too many", lambda: mindspeed_fx.explain(Model(), X, 1.0, 2.0), "too many positional arguments"),
    row("explain: unknown name", lambda: mindspeed_fx.explain(Model(), X, scal=1.0), "'scal'", "explain"),
    row(
        "explain: measure", lambda: mindspeed_fx.explain(Model(), X, measure="yes"), "measure is 'yes'", "True or False"
    ),
    row(
        "explain: measure without values",
        lambda: mindspeed_fx.explain(Model().to("meta"), X.to("meta"), measure=True),
        "measure",
        "meta",
    ),
    row(
        "explain: a pass that did not run",
        lambda: mindspeed_fx.explain(Model(), X, options={"codegen": "eager"}).sites("fusion.ropes"),
        '"fusion.ropes"',
        'did you mean "fusion.rope"',
        error=KeyError,
    ),
    row(
        "explain: report into a file",
        lambda: mindspeed_fx.explain(Model(), X, options={"codegen": "eager"}).save(file("report", "x")),
        "'report'",
        "directory",
        error=OSError,
    ),
]

PARALLELIZE = [
    row("parallelize: unknown plan", divide("zero4", "dp"), '"zero4"', "zero", "valid:"),
    row("parallelize: empty plan", divide("", "dp"), 'no plan is named ""', "valid:"),
    row("parallelize: dangling +", divide("zero2+", "dp"), 'no plan is named ""'),
    row("parallelize: a dict", divide({"name": "zero2"}, "dp"), "{'name': 'zero2'}", "Plan or the name of one"),
    row("parallelize: mesh of another name", divide("zero2", "tp"), 'mesh dimension "dp"', "tp"),
    row("parallelize: mesh without names", divide("zero2"), '"dp"', "mesh_dim_names"),
    row("parallelize: mesh of sizes", lambda: mindspeed_fx.parallelize(Model(), {"dp": 2}, "zero2"), "DeviceMesh"),
    row("parallelize: twice", divide_twice, "divided already", "zero2"),
    row("parallelize: inputs", divide("zero2", "dp", inputs="locl"), "inputs is 'locl'", 'did you mean "local"'),
    row("parallelize: check_inputs", divide("zero2", "dp", check_inputs="no"), "check_inputs is 'no'", "True or False"),
    row("parallelize: init", divide("zero2", "dp", init=3), "init is 3", "function"),
    row("parallelize: seed", divide("zero2", "dp", seed=-1), "seed is -1", "from 0"),
    row("parallelize: args of a plan", divide(Plan("mine", ("dp",)), "dp", args=(X,)), "args", "plans by name"),
    row("parallelize: args that it does not take", divide("tp", "tp", args=(X, 1, 2)), "too many positional"),
    row("parallelize: args that are a tensor", divide("tp", "tp", args=X), "args is a tensor", "tuple or list"),
    row("parallelize: kwargs", divide("tp", "tp", args=(X,), kwargs=[1]), "kwargs is [1]", "mapping"),
    row(
        "parallelize: plan of another model",
        divide(Plan("other", ("dp",), parameters={"blocks.*.weight": {"dp": "S(0)"}}), "dp"),
        '"blocks.*.weight"',
        'plan "other"',
    ),
    row("parallelize: module of another", divide(Plan("o", ("dp",), modules={"mlp": EDGE}), "dp"), '"mlp"', "module"),
    row(
        "parallelize: argument of another",
        divide(Plan("o", ("dp",), inputs={"ids": ROWS_OVER_DP}), "dp"),
        '"ids"',
        "x, scale",
    ),
    row(
        "parallelize: argument in capitals",
        divide(Plan("o", ("dp",), inputs={"X": ROWS_OVER_DP}), "dp"),
        '"X"',
        "x, scale",
    ),
    row(
        "parallelize: operator of no name",
        divide(Plan("o", ("dp",), operators={"mindspeed.atention": EDGE}), "dp"),
        '"mindspeed.atention"',
        'did you mean "mindspeed.attention"',
    ),
    row(
        "parallelize: one of two operators",
        divide(Plan("o", ("dp",), operators={"mindspeed.attention|aten.sdpa": EDGE}), "dp"),
        '"aten.sdpa"',
    ),
    row(
        "simulate: argument of another",
        simulate(plan=Plan("o", ("dp",), inputs={"ids": ROWS_OVER_DP})),
        '"ids"',
        "x, scale",
    ),
    row(
        "parallelize: a dimension that a parameter lacks",
        divide(Plan("deep", ("dp",), parameters={"layers.0.weight": {"dp": "S(2)"}}), "dp"),
        "layers.0.weight",
        "S(2)",
        "(8, 8)",
    ),
    row(
        "parallelize: sizes that do not divide",
        divide(Plan("odd", ("dp",), parameters={"layers.0.weight": {"dp": "S(0)"}}), "dp", count=3),
        "layers.0.weight",
        "(8, 8)",
        "3",
    ),
    row("parallelize: tp without linear layers", divide("tp", "tp", model=nn.ReLU), "tp", "linear"),
    row("parallelize: ep without experts", divide("ep", "ep"), "ep", "experts"),
    row("parallelize: ring of no number", divide("ring:x", "cp"), '"ring:x"', "ring:N"),
    row("parallelize: ring of 0", divide("ring:0", "cp"), '"ring:0"', "ring:N"),
    row("parallelize: a number for tp", divide("tp:2", "tp"), '"tp:2"', "ring:N"),
    row("parallelize: one dimension twice", divide("zero2+zero3", "dp"), "zero2", "zero3", "dp"),
    row("named_plan: no name", lambda: named_plan(None, Model()), "name is None", "zero2"),
    row("named_plan: no model", lambda: named_plan("zero2", None), "model is None", "Module"),
    row("named_plan: strict", lambda: named_plan("zero2", Model(), strict="yes"), "strict is 'yes'", "True or False"),
]

PIPELINE = [
    row("pipeline_stage: mesh without pp", stage(names=("dp",)), '"pp"', "dp"),
    row("pipeline_stage: mesh without names", stage(names=()), '"pp"', "mesh_dim_names"),
    row("pipeline_stage: no mesh", lambda: mindspeed_fx.pipeline_stage(Model(), None, None, (X,)), "mesh is None"),
    row("pipeline_stage: no plan for dp", stage(names=("pp", "dp")), "plan is None", "dp"),
    row("pipeline_stage: plan for pp alone", stage(plan="zero2"), '"dp"', "pp"),
    row("pipeline_stage: more stages than layers", stage(model=lambda: Model(1)), "pp=2", "no repeated layers"),
    row("pipeline_stage: no layers", stage(model=lambda: nn.Linear(8, 8)), "layers"),
    row("pipeline_stage: microbatches", stage(microbatches=3), "3 microbatches", "(4, 8)"),
    row("pipeline_stage: microbatches 0", stage(microbatches=0), "microbatches is 0", "from 1"),
    row("pipeline_stage: options", stage(options={"levl": 1}), '"levl"', "level"),
    row("pipeline_stage: on meta", stage(model=lambda: Model().to("meta")), "meta device", "initialize"),
    row("pipeline_stage: arguments", stage(args=()), "'x'", "scale"),
]


def with_results():
    """Recurrent models keep their last state."""
    model = Model()
    model.state = next(model.parameters()) * 2
    return model


SIMULATE = [
    row("simulate: plan of another dimension", simulate(mesh={"tp": 2}), '"dp"', "the mesh has tp"),
    row("simulate: plan that finds nothing", simulate(mesh={"tp": 2}, plan="tp"), 'plan "tp"', "layers.0", "q_proj"),
    row("simulate: unknown plan", simulate(plan="zero9"), '"zero9"', "zero"),
    row("simulate: stages", simulate(mesh={"pp": 9, "dp": 2}), "pp=9", "2 layers", "valid: 2 to 2"),
    row("simulate: no mixture", simulate(plan=NO_MIXTURE), 'plan "experts" sends tokens to experts', "no mixture"),
    row("simulate: a model with results", simulate(model=with_results), '"state" of the model', "has not run"),
    row("simulate: mesh of 0", simulate(mesh={"dp": 0}), 'mesh["dp"] is 0', "from 1"),
    row("simulate: local_inputs", simulate(local_inputs="yes"), "local_inputs is 'yes'", "True or False"),
    row("simulate: unknown argument", simulate(X, scal=2.0), "'scal'", "scale"),
    row("simulate: options", simulate(options={"level": 9}), '"level" is 9'),
    row(
        "simulate: in a group",
        on_mesh(lambda mesh: simulate()(), "dp"),
        "process group",
        error=(ValueError, RuntimeError),
    ),
]

SEARCH = [
    row("plan: neither devices nor mesh", search(devices=None), "devices is None and mesh is None"),
    row("plan: devices 0", search(devices=0), "devices is 0", "from 1"),
    row("plan: mesh name", search(mesh={"dq": 2}, devices=None), '"dq"', 'did you mean "dp"'),
    row("plan: mesh and devices", search(mesh={"dp": 4}, devices=2), "devices is 2", "4"),
    row("plan: hardware", search(hardware="ascend919"), '"hardware" is', "'ascend919'", "ascend910b2"),
    row("plan: memory", search(memory="60"), '"memory" is', "'60'", "GiB"),
    row("plan: optimizer", search(optimizer="adamw"), "optimizer is 'adamw'", "adam, sgd, momentum"),
    row("plan: keep", search(keep=0), "keep is 0", "from 1"),
    row("plan: microbatches", search(microbatches=True), "microbatches is True", "from 1"),
    row("plan: microbatches that do not divide", search(microbatches=3), "microbatches", "3", "4"),
    row("plan: zero", search(zero="zero1"), "zero is 'zero1'", "zero2"),
    row("plan: recompute", search(recompute="ful"), "recompute is 'ful'", "full"),
    row("plan: nothing fits", search(model=wide, args=(torch.zeros(4, 2048),), memory="2MiB"), "fits", "GiB"),
    row("plan: a loss that is no tensor", search(model=lambda: Constant()), "loss"),
    row("plan: arguments", search(args=()), "'x'", "scale"),
]


class Constant(Model):
    def forward(self, x, scale=1.0):
        return scale


PREDICT = [
    row("predict: unknown model", predict("llama3-9b"), "'llama3-9b'", "llama3-8b"),
    row("predict: no model", predict(None), "None", "architecture"),
    row("predict: a module", predict(Model()), "module", "architecture"),
    row("predict: unknown field", predict({"layer": 4}), "'layer'", "layers"),
    row("predict: fields that are missing", predict({"layers": 4}), "hidden", "heads"),
    row(
        "predict: negative layers",
        predict({"layers": -4, "hidden": 8, "heads": 2, "vocab": 8, "ffn": 8}),
        "layers is -4",
    ),
    row(
        "predict: NaN layers", predict({"layers": NAN, "hidden": 8, "heads": 2, "vocab": 8, "ffn": 8}), "layers is nan"
    ),
    row("predict: heads 0", predict({"layers": 4, "hidden": 8, "heads": 0, "vocab": 8, "ffn": 8}), "heads is 0"),
    row("predict: bool", predict({"layers": True, "hidden": 8, "heads": 2, "vocab": 8, "ffn": 8}), "layers is True"),
    row(
        "predict: norm",
        predict({"layers": 2, "hidden": 8, "heads": 2, "vocab": 8, "ffn": 8, "norm": "rns"}),
        "norm is 'rns'",
    ),
    row("predict: flags without sizes", predict(["--num-layers", "4"]), "--hidden-size"),
    row(
        "predict: a flag that is no number",
        predict([*FLAGS, "--ffn-hidden-size", "wide"]),
        "--ffn-hidden-size",
        "'wide'",
    ),
    row("predict: settings none", predict(run=None), "None", "devices"),
    row("predict: settings unknown", predict(run={**RUN, "device": 8}), "'device'", "devices"),
    row("predict: settings missing", predict(run={"devices": 8}), "sequence"),
    row("predict: devices -8", predict(run={**RUN, "devices": -8}), "devices is -8", "from 1"),
    row("predict: devices True", predict(run={**RUN, "devices": True}), "devices is True", "whole number"),
    row("predict: batch -1", predict(run={**RUN, "batch": -1}), "batch is -1"),
    row("predict: batch of a fraction", predict(run={**RUN, "batch": 64.0}), "batch is 64.0"),
    row("predict: batch that does not divide", predict(run={**RUN, "batch": 9}), "9", "dp=8"),
    row("predict: tp that does not divide", predict(run={**RUN, "tp": 3}), "tp=3", "8"),
    row("predict: ep that does not divide", predict(run={**RUN, "ep": 5}), "ep=5"),
    row("predict: etp -1", predict(run={**RUN, "etp": -1}), "etp is -1"),
    row("predict: shards -1", predict(run={**RUN, "shards": -1}), "shards is -1"),
    row("predict: shards that do not divide", predict(run={**RUN, "shards": 3}), "shards"),
    row("predict: zero 4", predict(run={**RUN, "zero": 4}), "zero is 4", "0, 1, 2, 3"),
    row("predict: zero True", predict(run={**RUN, "zero": True}), "zero is True"),
    row("predict: zero by name", predict(run={**RUN, "zero": "zero2"}), "zero is 'zero2'"),
    row("predict: precision", predict(run={**RUN, "precision": "bf16"}), "precision is 'bf16'", "bfloat16"),
    row("predict: recompute", predict(run={**RUN, "recompute": "some"}), "recompute is 'some'", "selective"),
    row("predict: recompute_layers", predict(run={**RUN, "recompute_layers": -1}), "recompute_layers is -1"),
    row("predict: fused unknown", predict(run={**RUN, "fused": ("rmsnorm",)}), "fused", "'rmsnorm'", "rms_norm"),
    row("predict: fused a text", predict(run={**RUN, "fused": "attention"}), "fused is 'attention'"),
    row("predict: a switch", predict(run={**RUN, "overlap_tp": "yes"}), "overlap_tp is 'yes'", "True or False"),
    row("predict: loss_chunks 0", predict(run={**RUN, "loss_chunks": 0}), "loss_chunks is 0"),
    row("predict: lora -1", predict(run={**RUN, "lora": -1}), "lora is -1"),
    row(
        "predict: pp of more layers",
        predict({"layers": 2, "hidden": 8, "heads": 2, "vocab": 8, "ffn": 8}, {**RUN, "pp": 8}),
        "pp=8",
        "2 layers",
    ),
    row("predict: hardware", predict(hardware="h1000"), '"hardware"', "'h1000'", "h100"),
    row("architecture: unknown change", lambda: architecture("llama3-8b", layer=3), "'layer'", "layers"),
    row("Architecture: negative", lambda: Architecture(-1, 8, 2, 8, 8), "layers is -1"),
    row("settings: a list", lambda: settings([1]), "[1]", "devices"),
    row("best_settings: sizes are missing", lambda: best_settings("llama3-8b", {"devices": 8}), "sequence", "batch"),
    row("best_settings: no run", lambda: best_settings("llama3-8b", None), "None", "devices"),
    row("best_settings: unknown", lambda: best_settings("llama3-8b", {**RUN, "tpp": 2}), "'tpp'", "tp"),
    row(
        "best_settings: a value that is wrong",
        lambda: best_settings("llama3-8b", {**RUN, "precision": "bf16"}),
        "precision is 'bf16'",
    ),
    row("best_settings: devices", lambda: best_settings("llama3-8b", {**RUN, "devices": 0}), "devices is 0"),
    row("best_settings: keep 0", lambda: best_settings("llama3-8b", RUN, keep=0), "keep is 0", "from 1"),
    row("best_settings: memory -1", lambda: best_settings("llama3-8b", RUN, memory=-1), "memory", "-1"),
    row("best_settings: memory NaN", lambda: best_settings("llama3-8b", RUN, memory=NAN), "memory", "nan"),
    row("best_settings: nothing fits", lambda: best_settings("llama3-8b", RUN, memory=2**20), "fits in"),
    row(
        "settings_from_flags: no number",
        lambda: settings_from_flags([*FLAGS, "--tensor-model-parallel-size", "two"], 8),
        "--tensor-model-parallel-size",
        "'two'",
    ),
    row("settings_from_flags: no sequence", lambda: settings_from_flags(FLAGS[:-2], 8), "--seq-length"),
    row("settings_from_flags: a text", lambda: settings_from_flags("--seq-length 4", 8), "'--seq-length 4'", "list"),
    row("settings_from_flags: devices", lambda: settings_from_flags(FLAGS, 0), "devices is 0"),
]

ROWS = COMPILE + PARALLELIZE + PIPELINE + SIMULATE + SEARCH + PREDICT

test_functions = table(ROWS)
