"""Every bad argument of a public function is one clear line: function, argument, value, and what is expected."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mindspeed_fx
from mindspeed_fx.arguments import parse_bytes
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() * scale


ARGS = (torch.zeros(4, 8),)
PLAN = {"model": Model, "args": ARGS, "devices": 2, "hardware": "ascend910b2"}


def function(x):
    return x


def refused(call, *words):
    with pytest.raises(OptionError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and all(w in text for w in words), text


BAD_MODELS = [
    (function, "the function function"),
    (None, "None"),
    ("model", "'model'"),
    (Model, "the class Model"),
    (3, "3"),
]
BAD_CALLS = [
    ({"args": torch.zeros(2)}, ("args is a tensor of shape (2,)", "(ids, labels)")),
    ({"args": "x"}, ("args is 'x'",)),
    ({"args": None}, ("args is None",)),
    ({"args": 3}, ("args is 3",)),
    ({"args": {"x": 1}}, ("args is {'x': 1}",)),
    ({"args": ()}, ("missing a required argument: 'x'", "(x, scale=1.0)")),
    ({"args": (*ARGS, 1.0, 2.0)}, ("too many positional arguments",)),
    ({"kwargs": {"scal": 1}}, ("unexpected keyword argument 'scal'",)),
    ({"kwargs": [1]}, ("kwargs is [1]",)),
    ({"kwargs": {1: 2}}, ("kwargs is {1: 2}",)),
]

BAD_MEMORY = [60, 0, -1, True, "", "sixty", "60", "60GB/s", 1000000, 0.5, float("nan"), float("inf"), [60], "64KiB"]


@pytest.mark.parametrize(
    "given,words",
    [
        *[({"model": lambda m=m: m}, ("model is " + says, "torch.nn.Module is expected")) for m, says in BAD_MODELS],
        *BAD_CALLS,
        *[({"devices": n}, (f"devices is {n!r}", "whole number from 1")) for n in (0, -2, True, 2.0, "8", [8])],
        ({"devices": None}, ("devices is None and mesh is None",)),
        *[
            ({"mesh": {"dp": n}, "devices": None}, (f'mesh["dp"] is {n!r}', "from 1 on"))
            for n in (0, -1, True, None, "2", 2.0)
        ],
        *[({"mesh": m, "devices": None}, (f"mesh is {m!r}",)) for m in ({}, [2], "dp=2", 2, {1: 2}, {"": 2})],
        ({"mesh": {"dq": 2}, "devices": None}, ('mesh dimension "dq"', 'did you mean "dp"')),
        ({"mesh": {"dp": 2}, "devices": 3}, ("devices is 3, and the mesh has 2",)),
        ({"mesh": {"dp": 2}, "devices": "2"}, ("devices is '2'",)),
        *[({"keep": n}, (f"keep is {n!r}", "from 1 on")) for n in (0, -1, True, None, "5", 1.5)],
        *[({"optimizer": o}, (f"optimizer is {o!r}", "adam, sgd, momentum")) for o in (None, [], 3, "adan", "")],
        *[({"pipeline": v}, (f"pipeline is {v!r}", "True or False")) for v in (None, 1, "yes")],
        *[({"hardware": h}, ('"hardware"', repr(h))) for h in (3, "", "ascend911", True)],
        *[({"memory": m}, ('"memory"', repr(m), "GiB")) for m in BAD_MEMORY],
    ],
)
def test_plan(given, words):
    given = {**PLAN, **given}
    refused(lambda: mindspeed_fx.plan(given.pop("model")(), **given), *words)


@pytest.fixture
def mesh():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield {d: init_device_mesh("cpu", (2,), mesh_dim_names=(d,)) for d in ("dp", "pp")} | {
        None: init_device_mesh("cpu", (2,))
    }
    dist.destroy_process_group()


def test_parallelize(mesh):
    dp = mesh["dp"]
    for model, says in BAD_MODELS:
        refused(lambda: mindspeed_fx.parallelize(model, dp, "zero2"), "parallelize: model is " + says)
    for bad in (None, 2, "dp", {"dp": 2}, ()):
        refused(lambda: mindspeed_fx.parallelize(Model(), bad, "zero2"), f"parallelize: mesh is {bad!r}", "DeviceMesh")
    refused(
        lambda: mindspeed_fx.parallelize(Model(), mesh[None], "zero2"), 'needs mesh dimension "dp"', "mesh_dim_names"
    )
    for bad in (None, 3, ["zero2"], {"name": "zero2"}, True):
        refused(lambda: mindspeed_fx.parallelize(Model(), dp, bad), f"plan is {bad!r}", "a Plan or the name of one")
    refused(lambda: mindspeed_fx.parallelize(Model(), dp, "zero4"), "zero4", 'did you mean "zero')
    refused(lambda: mindspeed_fx.parallelize(Model(), dp, ""), 'no plan is named ""')
    for name, bad in (("init", 3), ("init", "zeros"), ("seed", -1), ("seed", None), ("seed", "0"), ("seed", True)):
        refused(
            lambda: mindspeed_fx.parallelize(Model(), dp, "zero2", **{name: bad}), f"parallelize: {name} is {bad!r}"
        )


def test_simulate():
    for model, says in BAD_MODELS:
        refused(lambda: mindspeed_fx.simulate(model, {"dp": 2}, "zero2", *ARGS), "simulate: model is " + says)
    for bad in (None, 2, "dp", {}, ["dp"], {1: 2}):
        refused(lambda: mindspeed_fx.simulate(Model(), bad, "zero2", *ARGS), f"simulate: mesh is {bad!r}")
    for n in (0, -1, True, None, "2", 2.0):
        refused(lambda: mindspeed_fx.simulate(Model(), {"dp": n}, "zero2", *ARGS), f'simulate: mesh["dp"] is {n!r}')
    refused(lambda: mindspeed_fx.simulate(Model(), {"dp": 2}, None, *ARGS), "simulate: plan is None")
    refused(lambda: mindspeed_fx.simulate(Model(), {"dp": 2}, "zero2"), "missing a required argument: 'x'")
    refused(lambda: mindspeed_fx.simulate(Model(), {"dp": 2}, "zero2", *ARGS, options=3), "options is 3")
    refused(
        lambda: mindspeed_fx.simulate(Model(), {"dp": 2}, "zero2", *ARGS, options={"levl": 1}), 'did you mean "level"'
    )


def test_pipeline_stage(mesh):
    pp = mesh["pp"]
    for model, says in BAD_MODELS:
        refused(lambda: mindspeed_fx.pipeline_stage(model, pp, None, ARGS), "pipeline_stage: model is " + says)
    for given, words in BAD_CALLS:
        refused(
            lambda: mindspeed_fx.pipeline_stage(Model(), pp, None, **{"args": ARGS, **given}),
            "pipeline_stage: ",
            *words,
        )
    for bad in (None, 2, {"pp": 2}):
        refused(lambda: mindspeed_fx.pipeline_stage(Model(), bad, None, ARGS), f"pipeline_stage: mesh is {bad!r}")
    for name, bad in (
        ("microbatches", 0),
        ("microbatches", True),
        ("microbatches", "2"),
        ("seed", -1),
        ("init", 3),
        ("options", 3),
    ):
        refused(
            lambda: mindspeed_fx.pipeline_stage(Model(), pp, None, ARGS, **{name: bad}),
            f"pipeline_stage: {name} is {bad!r}",
        )
    refused(lambda: mindspeed_fx.pipeline_stage(Model(), pp, 3, ARGS), "pipeline_stage: plan is 3")
    refused(
        lambda: mindspeed_fx.pipeline_stage(Model(), pp, None, ARGS, microbatches=3),
        "cannot be split into 3 microbatches",
    )


def test_pipeline_stages(mesh):
    pp = mesh["pp"]
    for name, bad in (
        ("virtual", 0),
        ("virtual", "2"),
        ("style", 2),
        ("style", "w"),
        ("layers", 3),
        ("layers", "12"),
        ("layers", [1, 0]),
        ("layers", [True]),
        ("microbatches", 0),
    ):
        refused(
            lambda: mindspeed_fx.pipeline_stages(Model(), pp, None, ARGS, **{name: bad}),
            f"pipeline_stages: {name} is {bad!r}",
        )
    refused(
        lambda: mindspeed_fx.pipeline_stages(Model(), pp, None, ARGS, style="v", virtual=3),
        'virtual=3, style="v"; valid: 2 stages on a rank',
    )
    for bad in (None, 3, Model()):
        refused(lambda: mindspeed_fx.follow_shapes(bad), "follow_shapes: schedule is ")
        refused(lambda: mindspeed_fx.generate(bad, torch.zeros(1, 2, dtype=torch.long), 1), "generate: schedule is ")


def test_explain():
    for bad in (None, 3, "model", Model):
        refused(lambda: mindspeed_fx.explain(bad, *ARGS), "explain: model is")
    for bad in (3, "level=1", [1]):
        refused(lambda: mindspeed_fx.explain(Model(), *ARGS, options=bad), f"explain: options is {bad!r}")
    refused(lambda: mindspeed_fx.explain(Model(), *ARGS, options={"levl": 1}), 'did you mean "level"')


@pytest.mark.parametrize(
    "given,words",
    [
        ({"model": None}, ("model is None",)),
        ({"model": 3}, ("model is 3",)),
        ({"model": Model}, ("model is the class Model",)),
        ({"args": torch.zeros(2)}, ("args is a tensor",)),
        ({"args": None}, ("args is None",)),
        ({"kwargs": 3}, ("kwargs is 3",)),
        ({"soc": "Ascend910B9"}, ("soc is 'Ascend910B9'", "did you mean")),
        ({"soc": None}, ("soc is None", "Ascend910B2")),
        ({"options": 3}, ("options is 3",)),
        ({"baseline": 1}, ("baseline is 1",)),
        ({"kernels": None}, ("kernels is None",)),
        ({"toolchain": 3}, ("toolchain is 3",)),
        ({"toolchain": ""}, ("toolchain is ''",)),
        ({"timeout": 0}, ("timeout is 0",)),
        ({"timeout": True}, ("timeout is True",)),
        ({"timeout": "1"}, ("timeout is '1'",)),
    ],
)
def test_cross_compile(given, words):
    given = {"model": Model(), "args": ARGS, **given}
    refused(lambda: mindspeed_fx.cross_compile(given.pop("model"), **given), "cross_compile: ", *words)


# --------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "name,more",
    [
        ("memory_budget", {}),
        ("overlap_memory", {}),
        ("host_memory", {"offload": True, "memory_budget": "min"}),
        ("host_bandwidth", {"offload": True, "memory_budget": "min"}),
    ],
)
def test_sizes_that_nobody_means_are_refused(name, more):
    for bad in (24, 60, 1023, "24", "24B", 512.0):
        refused(lambda: Options(**{**more, name: bad}), f'"{name}" is {bad!r}', "bytes and too few to be meant", "GiB")
    for good in (1024, "24GiB", "1KiB", 24 * 2**30, "1000000", 1e9):
        assert getattr(Options(**{**more, name: good}), name) == parse_bytes(name, good)
    for bad in (-1, True, "", "24 apples", float("nan"), float("inf"), 1.5, [24]):
        refused(lambda: Options(**{**more, name: bad}), f'"{name}" is {bad!r}')


def test_no_bytes_and_fractions_stay_what_they_are():
    assert (
        Options(overlap_memory=0).overlap_memory == 0
        and Options(memory_budget=0.5).memory_budget == 0.5
        and Options(memory_budget=1).memory_budget == 1.0
    )
