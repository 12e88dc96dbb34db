"""Wrong inputs of what trains, counts, profiles and dumps."""

from __future__ import annotations

import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.cost.hardware import hardware, register
from tests.errors.models import Model, X, plain
from tests.errors.runner import file, row, table


def step(optimizer):
    return lambda: mindspeed_fx.step_in_backward(optimizer())


def adam(**more):
    return torch.optim.Adam(Model().parameters(), **more)


def parts(x, *more, module=nn.Identity, parts=2, **named):
    return lambda: mindspeed_fx.in_parts(module(), parts, **named)(x, *more)


def dump(model=Model, folder="dump", **more):
    def run():
        with mindspeed_fx.dump_tensors(model() if isinstance(model, type) else model, folder, **more):
            pass

    return run


TRAINING = [
    row(
        "accumulate: no function", lambda: mindspeed_fx.accumulate(None, X, microbatches=2), "step is None", "function"
    ),
    row("accumulate: 0", lambda: mindspeed_fx.accumulate(Model(), X, microbatches=0), "microbatches is 0", "from 1"),
    row("accumulate: True", lambda: mindspeed_fx.accumulate(Model(), X, microbatches=True), "microbatches is True"),
    row("accumulate: None", lambda: mindspeed_fx.accumulate(Model(), X, microbatches=None), "microbatches is None"),
    row(
        "accumulate: 3 of 4 rows",
        lambda: mindspeed_fx.accumulate(Model(), X, microbatches=3),
        "(4, 8)",
        "3 microbatches",
    ),
    row("accumulate: no loss", lambda: mindspeed_fx.accumulate(nn.Linear(8, 8), X, microbatches=2), "(2, 8)", "loss"),
    row(
        "accumulate: no tensor", lambda: mindspeed_fx.accumulate(lambda x: None, X, microbatches=2), "NoneType", "loss"
    ),
    row("accumulate: no gradient", lambda: mindspeed_fx.accumulate(lambda x: x.sum(), X, microbatches=2), "gradient"),
    row(
        "accumulate: a scalar",
        lambda: mindspeed_fx.accumulate(Model(), X, scale=torch.tensor(1.0), microbatches=2),
        '"scale"',
        "()",
    ),
    row("in_parts: 1", parts(X, parts=1), "parts is 1", "2, 3", error=ValueError),
    row("in_parts: True", parts(X, parts=True), "parts is True", error=ValueError),
    row("in_parts: a text", parts(X, parts="2"), "parts is '2'", error=ValueError),
    row("in_parts: no module", lambda: mindspeed_fx.in_parts(plain, 2), "plain", "Module", error=ValueError),
    row("in_parts: dim a text", parts(X, dim="rows"), "dim is 'rows'", error=ValueError),
    row("in_parts: dim of another", parts(X, dim=2), "dimension 2", "[4, 8]", error=ValueError),
    row("in_parts: arguments a text", parts(X, arguments="x"), "arguments is 'x'", "positions", error=ValueError),
    row("in_parts: no arguments", parts(X, arguments=()), "arguments is ()", error=ValueError),
    row("in_parts: an argument twice", parts(X, arguments=(0, 0)), "arguments is (0, 0)", "twice", error=ValueError),
    row("in_parts: an argument that is missing", parts(X, arguments=(1,)), "argument 1", error=ValueError),
    row("in_parts: fewer rows than parts", parts(X[:1]), "1 rows", "2", error=ValueError),
    row("in_parts: result without rows", parts(X, module=Model), "a part of 2 rows", "[]", error=ValueError),
    row(
        "step_in_backward: SGD",
        step(lambda: torch.optim.SGD(Model().parameters(), lr=1.0)),
        "SGD",
        "AdamW",
        error=ValueError,
    ),
    row("step_in_backward: a module", step(Model), "Model", "AdamW", error=ValueError),
    row("step_in_backward: amsgrad", step(lambda: adam(amsgrad=True)), "amsgrad=True", "False", error=ValueError),
    row(
        "step_in_backward: weight decay",
        step(lambda: adam(weight_decay=0.1)),
        "weight_decay=0.1",
        "AdamW",
        error=ValueError,
    ),
    row(
        "step_in_backward: Adam with a tensor for lr",
        step(lambda: adam(lr=torch.tensor(0.1), capturable=True)),
        "capturable=True",
        error=ValueError,
    ),
    row("split_backward: no module", lambda: mindspeed_fx.split_backward(None), "module is None", "Module"),
    row("split_backward: a function", lambda: mindspeed_fx.split_backward(plain), "plain", "Module"),
    row(
        "split_backward: codegen",
        lambda: mindspeed_fx.split_backward(Model(), {"codegen": "inductor"}),
        "'inductor'",
        '"eager"',
    ),
    row("split_backward: options", lambda: mindspeed_fx.split_backward(Model(), {"levl": 1}), '"levl"'),
    row("split_backward: options a text", lambda: mindspeed_fx.split_backward(Model(), "level"), "options is 'level'"),
    row("split_backward: ahead", lambda: mindspeed_fx.split_backward(Model(), ahead="yes"), "ahead is 'yes'"),
    row(
        "split_backward: no backward yet",
        lambda: mindspeed_fx.split_backward(Model()).dw_builder(),
        "no backward",
        error=RuntimeError,
    ),
    row(
        "split_backward: recompute",
        lambda: mindspeed_fx.split_backward(Model()).recompute(),
        "ahead=True",
        error=RuntimeError,
    ),
    row("FlopCount: eager", lambda: mindspeed_fx.FlopCount(eager="yes"), "eager is 'yes'", "True or False"),
    row("Profile: start 0", lambda: mindspeed_fx.Profile(start=0), "start 0", "from 1", error=ValueError),
    row("Profile: end before start", lambda: mindspeed_fx.Profile(start=3, end=3), "start 3, end 3", error=ValueError),
    row("Profile: start a text", lambda: mindspeed_fx.Profile(start="1"), "start", "'1'", error=ValueError),
    row("Profile: end None", lambda: mindspeed_fx.Profile(end=None), "end", "None", error=ValueError),
    row("Profile: start True", lambda: mindspeed_fx.Profile(start=True), "start", "True", error=ValueError),
    row("Profile: first 0", lambda: mindspeed_fx.Profile(first=0), "first", "0", error=ValueError),
    row("Profile: device", lambda: mindspeed_fx.Profile(device="gpu"), "device is 'gpu'", "cuda", error=ValueError),
    row(
        "Profile: a device that is not here",
        lambda: mindspeed_fx.Profile(device="cuda", start=1).__enter__(),
        "'cuda'",
        "cpu",
        error=ValueError,
    ),
    row(
        "Profile: level", lambda: mindspeed_fx.Profile(level="level3"), "level is 'level3'", "level2", error=ValueError
    ),
    row("Profile: export", lambda: mindspeed_fx.Profile(export="db"), "export is 'db'", "text", error=ValueError),
    row("Profile: ranks a number", lambda: mindspeed_fx.Profile(ranks=0), "ranks is 0", "list", error=ValueError),
    row("Profile: ranks texts", lambda: mindspeed_fx.Profile(ranks="0"), "ranks is '0'", error=ValueError),
    row("Profile: ranks negative", lambda: mindspeed_fx.Profile(ranks=[-1]), "ranks is [-1]", error=ValueError),
    row("Profile: a switch", lambda: mindspeed_fx.Profile(with_stack="yes"), "with_stack is 'yes'", error=ValueError),
    row("Profile: no path", lambda: mindspeed_fx.Profile(""), "path is ''", "directory", error=ValueError),
    row(
        "Profile: a file for the folder",
        lambda: mindspeed_fx.Profile(file("traces", "x")).__enter__(),
        "'traces'",
        "directory",
        error=(ValueError, OSError),
    ),
    row("dump_tensors: no module", dump(model=plain), "model is the function plain", "Module"),
    row(
        "dump_tensors: modules of no name",
        dump(modules="layer.*"),
        "'layer.*'",
        'did you mean "layers',
        error=ValueError,
    ),
    row("dump_tensors: modules no text", dump(modules=None), "modules is None", error=ValueError),
    row("dump_tensors: compiled", dump(compiled="yes"), "compiled is 'yes'", error=ValueError),
    row("dump_tensors: none is compiled", dump(compiled=True), "compiled", error=ValueError),
    row("dump_tensors: a file for the folder", lambda: dump(folder=file("dump", "x"))(), "'dump'", "directory"),
    row("dump_tensors: no folder", dump(folder=None), "folder is None", "directory"),
    row(
        "accelerate is missing",
        lambda m: (
            m.setitem(__import__("sys").modules, "accelerate.utils", None),
            mindspeed_fx.register_with_accelerate(),
        ),
        "accelerate",
        "pip install",
    ),
    row("an unknown name", lambda: mindspeed_fx.explian, "'explian'", 'did you mean "explain"', error=AttributeError),
    row("hardware: unknown", lambda: hardware("tpu"), "'tpu'", "h100"),
    row("hardware: register what is there", lambda: register(hardware("h100")), '"h100"', "replace=True"),
    row("hardware: register a name", lambda: register("h100"), "'h100'", "Hardware"),
]

test_training_functions = table(TRAINING)
