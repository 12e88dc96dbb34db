"""Options of the backend, wherever they come from."""

from __future__ import annotations

import pathlib
import re

import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.arguments import VARIABLES
from mindspeed_fx.options import Options
from mindspeed_fx.passes import PassError
from mindspeed_fx.passes.runner import Pipeline
from tests.errors.runner import file, row, table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)).square().mean()


def environment(text: str):
    return lambda: Options.parse({}, {"MINDSPEED_FX_OPTIONS": text})


def compiled(**options):
    """A step of a tiny model with these options."""
    return lambda: mindspeed_fx.compile(Model(), options={"codegen": "eager", **options})(torch.randn(2, 8)).backward()


def option(name: str, value: object, *words: str, beside: dict | None = None):
    """One option with a value that is wrong; its message has both."""
    say = repr(value)
    return row(
        f"{name} {say}"[:60], lambda: Options.parse({**(beside or {}), name: value}, {}), f'"{name}"', say, *words
    )


NAN, INFINITE = float("nan"), float("inf")
OFFLOADED = {"offload": True, "memory_budget": "min"}
BOOLEANS = ("offload", "certify", "count_flops", "strict", "regather")

VALUES = [
    *[option("level", v, "0, 1, 2") for v in (3, -1, True, 1.0, "1", None, [1])],
    *[option("target", v, "cpu", "npu") for v in ("gpu", "CPU", 1, None, True)],
    *[option("codegen", v, "inductor", "eager") for v in ("indcutor", "", None, 1)],
    *[option("check", v, "off", "each") for v in ("eech", True, None, 1)],
    *[option("enable", v, "list") for v in ("fusion.rope", None, [1], {"fusion.rope": 1})],
    *[option("disable", v, "list") for v in ("fusion.rope", 3)],
    *[option(name, v, "True or False") for name in BOOLEANS for v in ("yes", 1, None)],
    *[option("hardware", v, "ascend910b2", "h100") for v in ("ascend911", "", 3, True, ["h100"])],
    *[option("memory_budget", v, "24GiB", "(0, 1]") for v in (0, -1, 1.5, NAN, INFINITE, True, "", "max", "0.5", [1])],
    *[option("memory_budget", v, "too few") for v in (60, "60", "60B", 1023)],
    *[option("overlap_memory", v, "512MiB") for v in (-1, True, None, "many", NAN, "1 TB")],
    option("overlap_memory", 60, "too few", "60GiB"),
    *[option("host_memory", v, "GiB", beside=OFFLOADED) for v in (-1, True, "lots", NAN)],
    *[option("host_bandwidth", v, beside=OFFLOADED) for v in (0, -1, True, "fast", 50)],
    *[option("data_parallel", v, '"world"') for v in (True, 1, "", ["world"])],
    *[option("optimizer", v, "backward") for v in ("adam", True, "", 1)],
    *[option("dump", v, "directory") for v in ("", 3, True, b"dump")],
    *[option("inductor", v, "dict") for v in (True, [1], "max_autotune", None)],
    *[option("npugraph_ex", v, "dict", beside={"codegen": "npugraph_ex"}) for v in (True, None, "clone_input")],
    *[option("recompute", v, "selective", "block:N") for v in ("ful", "block:0", "block:", 3, True, "norm+norm", "")],
]

ROWS = [
    *VALUES,
    row("unknown name", lambda: Options.parse({"levl": 1}, {}), '"levl"', 'did you mean "level"', "memory_budget"),
    row("name of another case", lambda: Options.parse({"Level": 1}, {}), '"Level"', 'did you mean "level"'),
    row("name that is no text", lambda: Options.parse({1: 2}, {}), 'unknown option "1"', "level"),
    row("options that are no mapping", lambda: Options.parse([("level", 1)], {}), "options is", '{"level": 1}'),
    row("options that are a text", lambda: Options.parse('{"level": 1}', {}), "options is", "a mapping"),
    # ------------------------------------------------------------------ the environment
    row("environment: torn JSON", environment('{"level": 1'), "MINDSPEED_FX_OPTIONS is not JSON", '{"level": 1'),
    row("environment: a list", environment("[1]"), "MINDSPEED_FX_OPTIONS must be a JSON object", "[1]"),
    row("environment: a name", environment("level=1"), "MINDSPEED_FX_OPTIONS is not JSON", "level=1"),
    row("environment: unknown name", environment('{"lvl": 1}'), '"lvl" in MINDSPEED_FX_OPTIONS', "level"),
    row("environment: wrong value", environment('{"level": 7}'), '"level" is 7', "0, 1, 2", "MINDSPEED_FX_OPTIONS"),
    row("environment: Python's True", environment('{"strict": True}'), "is not JSON", "True"),
    row("environment: NaN", environment('{"memory_budget": NaN}'), '"memory_budget" is nan'),
    row(
        "environment: one name twice",
        environment('{"level": 1, "level": 2}'),
        "MINDSPEED_FX_OPTIONS",
        '"level" twice',
    ),
    row(
        "environment: a variable of nearly that name",
        lambda: Options.parse({}, {"MINDSPEED_FX_OPTION": '{"level": 1}'}),
        "MINDSPEED_FX_OPTION ",
        'did you mean "MINDSPEED_FX_OPTIONS"',
    ),
    # ------------------------------------------------------------------ what contradicts
    row("certify nothing", lambda: Options(certify=True), '"certify" is True', '"memory_budget" is None'),
    row("offload without a budget", lambda: Options(offload=True), '"offload" is True', '"memory_budget"'),
    row("host memory without offload", lambda: Options(host_memory="1GiB"), '"host_memory" is', '"offload" is False'),
    row("npugraph_ex without its codegen", lambda: Options(npugraph_ex={"a": 1}), '"npugraph_ex"', 'codegen is "auto"'),
    row(
        "recompute fixed beside a budget",
        lambda: Options(recompute="full", memory_budget=0.5),
        'policy "full"',
        '"memory_budget" is 0.5',
    ),
    row(
        "recompute offloads without offload",
        lambda: Options(recompute={"layers.*": "offload"}, memory_budget=0.5),
        '"layers.*"',
        '"offload": True',
    ),
    row("recompute maps to nothing", lambda: Options(recompute={"a": "recomput"}), '"a"', 'did you mean "recompute"'),
    row("recompute: policy of a mapping", lambda: Options(recompute={"policy": "som"}), "'som'", "selective"),
    row("recompute: a key that is no glob", lambda: Options(recompute={3: "save"}), "the key 3", "globs"),
    row(
        "npugraph_ex off npu",
        lambda: Options(codegen="npugraph_ex").resolve("cpu"),
        '"npugraph_ex"',
        'the target is "cpu"',
    ),
    row(
        "npugraph_ex with offload",
        lambda: Options(codegen="npugraph_ex", offload=True, memory_budget="min", target="npu").resolve("npu"),
        '"offload" is True',
        '"eager"',
    ),
    row("target that no device has", lambda: Options().resolve("xpu"), "\"target\" is 'xpu'", '"cuda"'),
    # ------------------------------------------------------------------ Inductor's
    row("inductor: unknown", lambda: Options(inductor={"max_autotun": True}), '"max_autotun"', '"max_autotune"'),
    row("inductor: text for a switch", lambda: Options(inductor={"max_autotune": "yes"}), "'yes'", "True or False"),
    row("inductor: 1 for a switch", lambda: Options(inductor={"max_autotune": 1}), "max_autotune = 1", "True or False"),
    row("inductor: text for a number", lambda: Options(inductor={"compile_threads": "4"}), "'4'", "a number"),
    row("inductor: number for a text", lambda: Options(inductor={"worker_start_method": 1}), "= 1", "a text"),
    row("inductor: key that is no text", lambda: Options(inductor={3: True}), 'unknown entry "3"'),
    # ------------------------------------------------------------------ passes
    row("enable: unknown", lambda: Pipeline(Options(enable=["fusion.rmsnorm"])), '"fusion.rmsnorm"', "fusion.rms_norm"),
    row("disable: unknown", lambda: Pipeline(Options(disable=["fusion.ropes"])), '"fusion.ropes"', "fusion.rope"),
    row("enable: a glob of nothing", lambda: Pipeline(Options(enable=["fuson.*"])), '"fuson.*"'),
    row("enable: the empty name", lambda: Pipeline(Options(enable=[""])), '""', "enable"),
    # ------------------------------------------------------------------ through torch.compile
    row("torch.compile: unknown", compiled(levl=1), '"levl"', 'did you mean "level"'),
    row(
        "torch.compile: mode",
        lambda: torch.compile(Model(), backend="mindspeed", mode="max-autotune")(torch.ones(2, 8)),
        "mode='max-autotune'",
        'options={"inductor"',
    ),
    row(
        "data_parallel without a group",
        compiled(data_parallel="world"),
        '"data_parallel" is',
        "'world'",
        "init_process_group",
    ),
    row("optimizer without an optimizer", compiled(optimizer="backward"), '"backward"', "step_in_backward(optimizer)"),
    row("recompute: a glob of no module", compiled(recompute={"norms": "save"}, strict=True), '"norms"', '"norm"'),
    row("dump into a file", lambda: compiled(dump=file("dump", "x"))(), '"dump"', "'dump'", "directory", error=OSError),
    row(
        "strict and nothing to do",
        compiled(strict=True, enable=["fusion.rope"]),
        '"fusion.rope"',
        "rewrote nothing",
        error=PassError,
    ),
]

test_options = table(ROWS)


def test_every_variable_that_is_read_is_known():
    root = pathlib.Path(mindspeed_fx.__file__).parent
    read = {name for path in root.rglob("*.py") for name in re.findall(r"\bMINDSPEED_FX_[A-Z_]+", path.read_text())}
    assert "MINDSPEED_FX_SKIP_FLAGS" in read and read <= set(VARIABLES)
