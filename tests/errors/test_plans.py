"""Plans: what they say, their files, sums of two, and what is asked of a searched one."""

from __future__ import annotations

import functools
import json

import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from tests.errors.runner import file, folder, row, table

OVER_TP = {"tp": "S(0)"}
NAN = float("nan")


def plan(name="mine", mesh=("tp",), **more):
    return lambda: Plan(name, mesh, **more)


def from_dict(**values):
    return lambda: Plan.from_dict({"name": "mine", "mesh": ["tp"], **values})


def load(text: str | bytes, name: str = "plan.yaml"):
    return lambda: Plan.load(file(name, text))


def loaded_json(**values):
    return load(json.dumps({"name": "mine", "mesh": ["tp"], **values}), "plan.json")


@functools.cache
def searched():
    """A plan of two devices for one linear layer."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return mindspeed_fx.plan(model, (torch.zeros(8, 16),), devices=2, hardware="ascend910b2")


def refuse_writes(monkeypatch):
    """As a read-only directory does, which root may write to."""

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    Plan("mine", ("tp",)).save("plan.yaml")


VALUES = [
    row("name: none", plan(name=None), "name is None", "text"),
    row("name: a number", plan(name=3), "name is 3"),
    row("name: empty", plan(name=""), "name is ''"),
    row("mesh: a text", plan(mesh="tp"), "mesh is 'tp'", '("dp", "tp")'),
    row("mesh: a number", plan(mesh=2), "mesh is 2"),
    row("mesh: numbers", plan(mesh=(2, 4)), "mesh is (2, 4)"),
    row("mesh: sizes", plan(mesh={"tp": 2}), "mesh is {'tp': 2}"),
    row("mesh: one name twice", plan(mesh=("tp", "tp")), "tp", "twice"),
    row("mesh: the empty name", plan(mesh=("",)), "mesh is ('',)"),
    row("parameters: a list", plan(parameters=["w"]), "parameters is ['w']", "mapping"),
    row("parameters: None", plan(parameters=None), "parameters is None", "mapping"),
    row("parameters: a placement without dimension", plan(parameters={"w": "S(0)"}), '"w"', "'S(0)'", '{"tp": "S(0)"}'),
    row("parameters: a pattern that is no text", plan(parameters={3: OVER_TP}), "3", "glob"),
    row("parameters: the empty pattern", plan(parameters={"": OVER_TP}), '""'),
    row("parameters: unknown dimension", plan(parameters={"w": {"tq": "S(0)"}}), '"tq"', 'did you mean "tp"'),
    *[
        row(f"placement: {w!r}", plan(parameters={"w": {"tp": w}}), repr(w), "R (whole)", "S(d)")
        for w in ("S0", "s(0)", "S(x)", "S()", "P", "", 0, None, True)
    ],
    row("inputs: a text", plan(inputs="x"), "inputs is 'x'", "mapping"),
    row("inputs: unknown dimension", plan(inputs={"x": {"dp": "S(0)"}}), '"dp"', "tp"),
    row("modules: a placement", plan(modules={"m": OVER_TP}), '"m"', "Boundary"),
    row("modules: arguments", plan(modules={"m": Boundary(arguments={"x": OVER_TP})}), '"m"', "arguments", "operators"),
    row("modules: a word of an edge", plan(modules={"m": Boundary(input={"tp": "S"})}), "'S'", "input"),
    row("modules: an edge that is no mapping", plan(modules={"m": Boundary(input="S(0)")}), "'S(0)'", "input"),
    row("operators: None", plan(operators={"mindspeed.attention": None}), '"mindspeed.attention"', "Boundary"),
    row("gather: unknown stage", plan(gather={"tp": "zero4"}), "'zero4'", "zero3"),
    row("gather: a number", plan(gather={"tp": 3}), "3", "zero3"),
    row("gather: a word", plan(gather="zero3"), "gather is 'zero3'", "mapping"),
    row("gather: unknown dimension", plan(gather={"dp": "zero3"}), '"dp"', "tp"),
    row("rings: 0", plan(rings={"tp": 0}), "0", "from 1"),
    row("rings: True", plan(rings={"tp": True}), "True", "from 1"),
    row("rings: unknown dimension", plan(rings={"cp": 2}), '"cp"', "tp"),
    row("rings: a number", plan(rings=2), "rings is 2", "mapping"),
    row("experts: unknown key", plan(experts={"dispach": "all_to_all"}), '"dispach"', 'did you mean "dispatch"'),
    row("experts: unknown dispatch", plan(experts={"dispatch": "alltoall"}), "'alltoall'", "all_to_all"),
    row("experts: capacity below 1", plan(experts={"dispatch": "all_to_all", "capacity": 0.5}), "0.5", "from 1"),
    row("experts: capacity NaN", plan(experts={"dispatch": "all_to_all", "capacity": NAN}), "nan", "from 1"),
    row("experts: capacity without all_to_all", plan(experts={"capacity": 2}), "capacity is 2", "all_to_all"),
    row("experts: parameters a text", plan(experts={"parameters": "w"}), "'w'", "list"),
    row("experts: parameters a number", plan(experts={"parameters": 3}), "3", "list"),
    row("experts: a word", plan(experts="all_to_all"), "experts is 'all_to_all'", "mapping"),
    row("recompute: unknown", plan(recompute="ful"), "'ful'", 'did you mean "full"'),
    row("recompute: auto", plan(recompute="auto"), "'auto'", "selective"),
    row("recompute: True", plan(recompute=True), "True", "selective"),
    row("keep_whole: a word", plan(keep_whole="yes"), "'yes'", "True, False"),
    row("microbatches: 0", plan(microbatches=0), "0", "from 1"),
    row("microbatches: True", plan(microbatches=True), "True", "from 1"),
    row("sum: one dimension twice", lambda: plan()() + plan("other")(), '"mine"', '"other"', "tp"),
    row("sum: a name", lambda: plan()() + "zero2", "'zero2'", "Plan", error=(TypeError, ShardingError)),
    row(
        "sum: two policies",
        lambda: plan(recompute="full")() + plan("other", ("dp",), recompute="norm")(),
        "recompute",
        "'full'",
        "'norm'",
    ),
    row("diff: a name", lambda: plan()().diff("zero2"), "'zero2'", "Plan", error=(TypeError, ShardingError)),
]

FILES = [
    row("file: not there", lambda: Plan.load("plan.yaml"), "plan.yaml", "no such file", error=FileNotFoundError),
    row("file: a directory", lambda: Plan.load(folder("plan.yaml")), "plan.yaml", "directory", error=IsADirectoryError),
    row("file: no name", lambda: Plan.load(None), "path is None"),
    row("file: empty", load(""), "plan.yaml", "no plan", "mesh"),
    row("file: empty JSON", load("", "plan.json"), "plan.json", "JSON"),
    row("file: torn JSON", load('{"name": "mine", "mesh": ["tp"', "plan.json"), "plan.json", "JSON"),
    row("file: torn YAML", load("name: mine\nmesh: [tp\nparameters: {"), "plan.yaml, line 3", "YAML"),
    row("file: a list", load("- name\n- mesh\n"), "plan.yaml", "mapping"),
    row("file: a text", load("hello"), "plan.yaml", "mapping"),
    row("file: bytes", load(b"\x80\x81\xff\x00"), "plan.yaml"),
    row("file: bytes of JSON", load(b"\x80\x81\xff\x00", "plan.json"), "plan.json"),
    row("file: objects of Python", load("!!python/object/apply:os.system ['true']\n"), "plan.yaml", "YAML"),
    row("file: no name and mesh", load("parameters: {}\n"), "plan.yaml", '"name"'),
    row("file: unknown key", loaded_json(parameter={}), "plan.json", '"parameter"', 'did you mean "parameters"'),
    row(
        "file: a key twice in JSON",
        load('{"name": "a", "name": "b", "mesh": ["tp"]}', "plan.json"),
        "plan.json",
        '"name" twice',
    ),
    row("file: a key twice in YAML", load("name: a\nmesh: [tp]\nname: b\n"), "plan.yaml", "name", "twice"),
    row(
        "file: a pattern twice",
        load("name: a\nmesh: [tp]\nparameters:\n  w: {tp: S(0)}\n  w: {tp: R}\n"),
        "plan.yaml",
        "w",
        "twice",
    ),
    row("file: wrong word", loaded_json(parameters={"w": {"tp": "S0"}}), "plan.json", "'S0'", "S(d)"),
    row(
        "file: unknown edge",
        loaded_json(modules={"m": {"inputs": OVER_TP}}),
        "plan.json",
        '"inputs"',
        'did you mean "input"',
    ),
    row("file: edge of no mapping", loaded_json(modules={"m": "S(0)"}), "plan.json", "'S(0)'"),
    row("file: modules of no mapping", loaded_json(modules=["m"]), "plan.json", "modules is ['m']"),
    row("file: mesh of a text", loaded_json(mesh="tp"), "plan.json", "mesh is 'tp'"),
    row("file: YAML's yes", load("name: a\nmesh: [tp]\nkeep_whole: maybe\n"), "plan.yaml", "'maybe'", "True, False"),
    row("from_dict: a list", lambda: Plan.from_dict(["name"]), "plan is ['name']", "mapping"),
    row("from_dict: None", lambda: Plan.from_dict(None), "plan is None", "mapping"),
    row("from_dict: no mesh", lambda: Plan.from_dict({"name": "a"}), '"mesh"'),
    row("from_dict: operators None", from_dict(operators=None), "operators is None", "mapping"),
    row(
        "save: no directory",
        lambda: plan()().save("nowhere/plan.yaml"),
        "nowhere/plan.yaml",
        error=(OSError, ShardingError),
    ),
    row("save: a directory", lambda: plan()().save(folder("plan.yaml")), "plan.yaml", error=(OSError, ShardingError)),
    row("save: read-only", refuse_writes, "plan.yaml", "Permission denied", error=OSError),
]

SEARCHED = [
    row("searched: unknown parameter", lambda: searched().explain("0.weigth"), '"0.weigth"', 'did you mean "0.weight"'),
    row("searched: no text", lambda: searched().explain(None), "None", "parameter"),
    row("searched: a dimension too many", lambda: searched().explain("0.weight", "S(2)"), "(16, 16)", "no dimension 2"),
    row("searched: a placement", lambda: searched().explain("0.weight", "S0"), "'S0'", "S(d)"),
    row("searched: placements", lambda: searched().explain("0.weight", 3), "3", "S(d)"),
    row("searched: price of a name", lambda: searched().price("zero2"), "'zero2'", "Plan"),
    row("searched: price of sizes", lambda: searched().price(plan()(), {"tp": 0}), 'mesh["tp"] is 0', "from 1"),
    row("searched: price of more devices", lambda: searched().price(plan()(), {"tp": 4}), "4", "2"),
    row(
        "searched: picture nowhere",
        lambda: searched().save_picture("nowhere/a.html"),
        "nowhere/a.html",
        error=(OSError, ShardingError),
    ),
]

ROWS = VALUES + FILES + SEARCHED

test_plans = table(ROWS)
