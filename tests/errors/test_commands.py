"""The commands of ``mindspeed-fx``: one line on stderr, a status that is not 0, and no traceback."""

from __future__ import annotations

import json
import pathlib

import torch

from tests.errors.runner import command, file, folder, table

MAKE = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.zeros(4, 8),)
"""
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 8"
)


def script(*words: str, text: str = MAKE, name: str = "train.py"):
    """Arguments of a command, after ``train.py`` is written."""
    return lambda: [file(name, text) and word for word in words]


def returning(value: str) -> str:
    return f"import torch\n\ndef make():\n    return {value}\n"


def flags(*words: str):
    return lambda: ["flags", "--", *FLAGS.split(), *words]


def tune(*words: str, own: tuple = ("--devices", "8")):
    return lambda: ["tune", *own, "--", *FLAGS.split(), *words]


def flags_file(text: str):
    return lambda: ["flags", "--file", file("args.json", text)]


def dump(name: str, text: str = "", **tensors):
    """A folder that looks like a dump of tensors."""
    index = [
        {"module": n, "kind": "output", "call": 0, "output": 0, "file": f"{i:06}.pt"} for i, n in enumerate(tensors)
    ]
    file(f"{name}/rank0/index.jsonl", text or "".join(json.dumps(row) + "\n" for row in index))
    for i, tensor in enumerate(tensors.values()):
        torch.save(tensor, f"{name}/rank0/{i:06}.pt")
    return name


def torn_dump():
    dump("a", x=torch.zeros(2))
    file("a/rank0/000000.pt", b"PK\x03\x04 torn")
    return ["compare-dumps", "a", dump("b", x=torch.zeros(2))]


TOP = [
    command("no command", "", "command", "explain", "doctor"),
    command("unknown command", "explian", "'explian'", "explain"),
    command("unknown option", "doctor --jsn", "--jsn"),
    command("an argument too many", "passes fusion.rope", "fusion.rope"),
    command("doctor: an argument too many", "doctor all", "all"),
    command("words after -- that no script gets", "passes -- --verbose", "--verbose"),
    command("doctor: words after --", "doctor -- x", "x"),
]

EXPLAIN = [
    command("ask: nothing", "ask", "SCRIPT.py:FUNCTION|DIR", "ask"),
    command("ask: no such place", "ask nowhere peak", "'nowhere'", "SCRIPT.py:FUNCTION", "directory"),
    command("ask: no such question", script("ask", "train.py:make", "peek"), "'peek'", 'did you mean "peak"', "batch"),
    command("ask: no such level", script("ask", "train.py:make", "level", "7"), "level: '7'", "0, 1, 2"),
    command("index: nowhere", "index nowhere", "nowhere is no dump", "rank*/graph*"),
    command("explain: nothing", "explain", "script", "explain"),
    command("explain: no script", "explain train.py", "train.py", "no"),
    command("explain: no script of a function", "explain train.py:make", "train.py", "no"),
    command("explain: no Python", "explain train.sh", "train.sh", ".py"),
    command("explain: a directory", lambda: ["explain", folder("train.py")], "train.py", "directory"),
    command("explain: no such function", script("explain", "train.py:mak"), "'mak'", "train.py", 'did you mean "make"'),
    command("explain: empty function", script("explain", "train.py:"), "train.py:", "FUNCTION"),
    command("explain: no function", script("explain", "train.py:nn"), "'nn' is no function", "make"),
    command(
        "explain: returns nothing",
        script("explain", "train.py:make", text=returning("None")),
        "make",
        "(model, args)",
        "None",
    ),
    command(
        "explain: returns a model",
        script("explain", "train.py:make", text=returning("torch.nn.Linear(2, 2)")),
        "(model, args)",
        "Linear",
    ),
    command(
        "explain: returns no model",
        script("explain", "train.py:make", text=returning("(3, (torch.ones(2),))")),
        "model is 3",
    ),
    command(
        "explain: returns no arguments",
        script("explain", "train.py:make", text=returning("(torch.nn.Linear(2, 2), torch.ones(2))")),
        "args is a tensor",
        "tuple",
    ),
    command(
        "explain: returns no kwargs",
        script("explain", "train.py:make", text=returning("(torch.nn.Linear(2, 2), (torch.ones(2),), 3)")),
        "kwargs is 3",
    ),
    command(
        "explain: arguments of another",
        script("explain", "train.py:make", text=returning("(torch.nn.Linear(2, 2), ())")),
        "'input'",
    ),
    command(
        "explain: sizes of another",
        script("explain", "train.py:make", text=returning("(torch.nn.Linear(2, 2), (torch.ones(3),))")),
        "train.py",
        "RuntimeError",
        "[1, 3] X [2, 2]",
    ),
    command(
        "explain: a function with arguments",
        script("explain", "train.py:make", text="def make(size):\n    return size\n"),
        "make",
        "size",
    ),
    command(
        "explain: a function that fails",
        script("explain", "train.py:make", text="def make():\n    return 1 / 0\n"),
        "train.py:2",
        "ZeroDivisionError: division by zero",
    ),
    command(
        "explain: a script that fails",
        script("explain", "train.py", text="x = {}\nx['lr']\n"),
        "train.py:2",
        "KeyError: 'lr'",
    ),
    command(
        "explain: a script that asserts",
        script("explain", "train.py", text="assert False, 'lost'\n"),
        "train.py:1",
        "AssertionError: lost",
    ),
    command(
        "explain: a script that ends",
        script("explain", "train.py", text="import sys\nsys.exit(3)\n"),
        "train.py",
        "status 3",
    ),
    command(
        "explain: a script that ends with a text",
        script("explain", "train.py", text="import sys\nsys.exit('no data')\n"),
        "train.py",
        "no data",
    ),
    command("explain: a slip of syntax", script("explain", "train.py", text="def f(:\n"), "train.py:1", "SyntaxError"),
    command(
        "explain: an import that is missing",
        script("explain", "train.py", text="import nosuchmodule\n"),
        "train.py:1",
        "nosuchmodule",
    ),
    command(
        "explain: compiles nothing",
        script("explain", "train.py", text="x = 1\n"),
        "train.py",
        'backend="mindspeed"',
        status=1,
    ),
    command(
        "explain: options of the script",
        script(
            "explain",
            "train.py",
            text="import torch\ntorch.compile(abs, backend='mindspeed', options={'levl': 1})(torch.ones(2))\n",
        ),
        '"levl"',
        "level",
    ),
    command(
        "explain: options no JSON",
        script("explain", "train.py", "--options", "level=1"),
        "--options is not JSON",
        "level=1",
    ),
    command(
        "explain: options unknown",
        script("explain", "train.py:make", "--options", '{"levl": 1}'),
        '"levl"',
        'did you mean "level"',
    ),
    command(
        "explain: options twice",
        script("explain", "train.py:make", "--options", '{"level": 1, "level": 2}'),
        '"level" twice',
        "--options",
    ),
    command("explain: options wrong", script("explain", "train.py:make", "--options", '{"level": 5}'), '"level" is 5'),
    command(
        "explain: measure of a script", script("explain", "train.py", "--measure"), "--measure", "SCRIPT.py:FUNCTION"
    ),
    command(
        "explain: curve of a script",
        script("explain", "train.py", "--memory-curve"),
        "--memory-curve",
        "SCRIPT.py:FUNCTION",
    ),
    command(
        "explain: save into a file",
        script("explain", "train.py:make", "--save", "train.py"),
        "--save train.py",
        "directory",
    ),
    command(
        "explain: words of a function",
        script("explain", "train.py:make", "--", "--epochs", "3"),
        "--epochs 3",
        "train.py:make",
    ),
    command("explain: save is missing", script("explain", "train.py:make", "--save"), "--save", "argument"),
]

PLAN = [
    command("plan: nothing", "plan", "SCRIPT.py:FUNCTION"),
    command("plan: no function", script("plan", "train.py", "--devices", "2"), "'train.py'", "SCRIPT.py:FUNCTION"),
    command("plan: no script", "plan train.py:make --devices 2", "train.py"),
    command("plan: no such function", script("plan", "train.py:mak", "--devices", "2"), "'mak'", "make"),
    command("plan: neither devices nor mesh", script("plan", "train.py:make"), "--devices", "--mesh"),
    command("plan: devices no number", script("plan", "train.py:make", "--devices", "two"), "--devices", "'two'"),
    command("plan: devices 0", script("plan", "train.py:make", "--devices", "0"), "devices is 0"),
    command("plan: mesh no sizes", script("plan", "train.py:make", "--mesh", "dp2"), "--mesh 'dp2'", "dp=8,tp=8"),
    command(
        "plan: mesh of a word", script("plan", "train.py:make", "--mesh", "dp=two"), "--mesh 'dp=two'", "dp=8,tp=8"
    ),
    command(
        "plan: mesh twice", script("plan", "train.py:make", "--mesh", "dp=2,dp=4"), "--mesh 'dp=2,dp=4'", "dp", "twice"
    ),
    command("plan: mesh unknown", script("plan", "train.py:make", "--mesh", "dq=2"), '"dq"', 'did you mean "dp"'),
    command("plan: mesh negative", script("plan", "train.py:make", "--mesh", "dp=-2"), "-2", "from 1"),
    command("plan: mesh empty", script("plan", "train.py:make", "--mesh", ""), "--mesh ''", "dp=8,tp=8"),
    command("plan: hardware", script("plan", "train.py:make", "--devices", "2", "--hardware", "h1"), "'h1'", "h100"),
    command("plan: memory", script("plan", "train.py:make", "--devices", "2", "--memory", "much"), "'much'", "GiB"),
    command(
        "plan: optimizer", script("plan", "train.py:make", "--devices", "2", "--optimizer", "adamw"), "'adamw'", "adam"
    ),
    command("plan: keep", script("plan", "train.py:make", "--devices", "2", "--keep", "0"), "keep is 0"),
    command(
        "plan: explain of no parameter",
        script("plan", "train.py:make", "--devices", "2", "--explain", "0.weigth"),
        '"0.weigth"',
        "0.weight",
    ),
    command(
        "plan: save into a directory",
        lambda: ["plan", file("train.py", MAKE) + ":make", "--devices", "2", "--save", folder("plans")],
        "--save plans",
        "directory",
    ),
    command(
        "plan: save where nothing is",
        script("plan", "train.py:make", "--devices", "2", "--save", "nowhere/plan.yaml"),
        "--save nowhere/plan.yaml",
        "nowhere",
    ),
    command(
        "plan: picture where nothing is",
        script("plan", "train.py:make", "--devices", "2", "--html", "nowhere/plan.html"),
        "--html nowhere/plan.html",
        "nowhere",
    ),
    command(
        "plan: a function that fails",
        script("plan", "train.py:make", "--devices", "2", text="def make():\n    raise RuntimeError('no data')\n"),
        "train.py:2",
        "RuntimeError: no data",
    ),
]

CROSS = [
    command("cross: nothing", "cross", "SCRIPT.py:FUNCTION"),
    command("cross: no function", script("cross", "train.py"), "'train.py'", "SCRIPT.py:FUNCTION"),
    command("cross: no script", "cross train.py:make", "train.py"),
    command("cross: soc", script("cross", "train.py:make", "--soc", "Ascend910B9"), "'Ascend910B9'", "Ascend910B"),
    command("cross: options", script("cross", "train.py:make", "--options", '{"levl": 1}'), '"levl"', "level"),
    command(
        "cross: options that are no npu's",
        script("cross", "train.py:make", "--options", '{"target": "cuda"}'),
        "'cuda'",
        '"npu"',
    ),
    command(
        "cross: no tool chain",
        script("cross", "train.py:make", "--dir", "empty"),
        "torch_npu",
        "is not installed",
        "mindspeed-fx toolchain install --dir empty",
    ),
    command(
        "cross: a file for the tool chain",
        script("cross", "train.py:make", "--dir", "train.py"),
        "train.py",
        "directory",
    ),
    command(
        "cross: report where nothing is",
        script("cross", "train.py:make", "--json", "nowhere/a.json"),
        "--json nowhere/a.json",
        "nowhere",
    ),
    command(
        "cross: report into a directory",
        lambda: ["cross", file("train.py", MAKE) + ":make", "--html", folder("page")],
        "--html page",
        "directory",
    ),
]

TOOLCHAIN = [
    command("toolchain: nothing", "toolchain", "action"),
    command("toolchain: unknown action", "toolchain remove", "'remove'", "install", "status"),
    command("toolchain: unknown component", "toolchain status torch_nup", '"torch_nup"', "torch_npu"),
    command(
        "toolchain: a file for the directory",
        lambda: ["toolchain", "install", "--dir", file("here", "x")],
        "here",
        "directory",
    ),
    command(
        "toolchain: status of a file", lambda: ["toolchain", "status", "--dir", file("here", "x")], "here", "directory"
    ),
    command("toolchain: torch that was not tried", lambda m: untried_torch(m), "torch 9.1", "known"),
]


def untried_torch(monkeypatch) -> list[str]:
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.1.0")
    from mindspeed_fx.ascend import toolchain

    toolchain.components.cache_clear() if hasattr(toolchain.components, "cache_clear") else None
    return ["toolchain", "status"]


FLAG_ROWS = [
    command("flags: an argument without --", "flags --num-layers 4", "--num-layers"),
    command("flags: no file", "flags --file args.json", "args.json", "no"),
    command("flags: a directory", lambda: ["flags", "--file", folder("args.json")], "args.json", "directory"),
    command("flags: torn JSON", flags_file('["--num-layers"'), "args.json", "JSON"),
    command("flags: empty file", flags_file(""), "args.json", "JSON"),
    command("flags: no list", flags_file('{"num-layers": 4}'), "args.json", '["--num-layers", "4"]'),
    command("flags: numbers in the list", flags_file('["--num-layers", 4]'), "args.json", '["--num-layers", "4"]'),
    command(
        "flags: bytes that are no text", lambda: ["flags", "--file", file("args.json", b"\xff\xfe\x00[")], "args.json"
    ),
    command("flags: no number", flags("--moe-zero-memory-num-layers", "two"), "--moe-zero-memory-num-layers", "'two'"),
    command("flags: no choice", flags("--moe-zero-memory", "level9"), "--moe-zero-memory", "'level9'", "level0"),
    command("flags: value is missing", flags("--swap-attention", "--moe-zero-memory"), "--moe-zero-memory", "argument"),
    command(
        "flags: skip of no flag", flags("--mindspeed-skip-flags", "swap-atention"), "swap-atention", "swap-attention"
    ),
    command(
        "flags: skip of what changes values",
        flags("--mindspeed-skip-flags", "position-embedding-type"),
        "position-embedding-type",
    ),
    command("flags: page and words", lambda: ["flags", "--page", "--", "--num-layers", "4"], "--page"),
    command("flags: words that are no flags", lambda: ["flags", "--", "num-layers"], "num-layers"),
]

TUNE = [
    command("tune: no devices", "tune -- --num-layers 4", "--devices"),
    command("tune: devices no number", "tune --devices eight -- --num-layers 4", "--devices", "'eight'"),
    command("tune: devices 0", tune(own=("--devices", "0")), "--devices 0", "from 1"),
    command("tune: no words", "tune --devices 8", "after --"),
    command("tune: an argument without --", "tune --devices 8 --num-layers 4", "--num-layers", "--"),
    command("tune: no number", tune("--tensor-model-parallel-size", "two"), "--tensor-model-parallel-size", "'two'"),
    command("tune: negative", tune("--tensor-model-parallel-size", "-2"), "tp", "-2"),
    command("tune: no sequence", lambda: ["tune", "--devices", "8", "--", "--num-layers", "4"], "--seq-length"),
    command("tune: what does not divide", tune("--tensor-model-parallel-size", "3"), "tp=3", "8"),
    command("tune: fix", tune(own=("--devices", "8", "--fix", "dp")), "--fix dp", "tp"),
    command("tune: hardware", tune(own=("--devices", "8", "--hardware", "ascend")), "'ascend'", "ascend910b2"),
    command("tune: memory", tune(own=("--devices", "8", "--memory", "60")), "'60'", "60GiB"),
    command("tune: a share of memory", tune(own=("--devices", "8", "--memory", "-1GiB")), "--memory"),
    command("tune: nothing fits", tune(own=("--devices", "1", "--memory", "2MiB")), "fits"),
]

CALIBRATE = [
    command("calibrate: device", "calibrate --device gpu", "'gpu'", "cuda"),
    command("calibrate: a device that is not here", "calibrate --device cuda", '"cuda"', "cpu"),
    command("calibrate: kinds", "calibrate --device cpu --kinds products", "'products'", 'did you mean "product"'),
    command("calibrate: dtypes", "calibrate --device cpu --dtypes bf16", "'bf16'", "bfloat16"),
    command("calibrate: dtypes twice", "calibrate --device cpu --dtypes float32,float32", "float32", "twice"),
    command("calibrate: seconds 0", "calibrate --device cpu --seconds 0", "seconds is 0", "above 0"),
    command("calibrate: seconds NaN", "calibrate --device cpu --seconds nan", "seconds is nan"),
    command("calibrate: seconds inf", "calibrate --device cpu --seconds inf", "seconds is inf"),
    command("calibrate: seconds no number", "calibrate --seconds long", "--seconds", "'long'"),
    command("calibrate: base", "calibrate --device cpu --base h1000", "'h1000'", "h100"),
    command("calibrate: base of another", "calibrate --device cpu --base h100", '"h100"', "cpu"),
    command(
        "calibrate: page where nothing is",
        "calibrate --device cpu --page nowhere/page.html",
        "--page nowhere/page.html",
        "nowhere",
    ),
    command(
        "calibrate: page into a directory",
        lambda: ["calibrate", "--device", "cpu", "--page", folder("page")],
        "--page page",
        "directory",
    ),
    command(
        "calibrate: table into a directory",
        lambda: ["calibrate", "--device", "cpu", "--out", folder("table")],
        "--out table",
        "directory",
    ),
    command(
        "calibrate: table below a file",
        lambda: ["calibrate", "--device", "cpu", "--out", file("a", "x") + "/table.json"],
        "--out a/table.json",
        "directory",
    ),
]

COMPARE = [
    command("compare-dumps: one", "compare-dumps a", "B"),
    command("compare-dumps: none is there", "compare-dumps a b", "a", "no dump"),
    command(
        "compare-dumps: an empty folder",
        lambda: ["compare-dumps", dump("a", x=torch.zeros(2)), folder("b")],
        "b",
        "no dump",
    ),
    command(
        "compare-dumps: a file", lambda: ["compare-dumps", dump("a", x=torch.zeros(2)), file("b", "x")], "b", "no dump"
    ),
    command("compare-dumps: rtol no number", "compare-dumps a b --rtol small", "--rtol", "'small'"),
    command(
        "compare-dumps: rtol negative",
        lambda: ["compare-dumps", dump("a", x=torch.zeros(2)), dump("b", x=torch.zeros(2)), "--rtol", "-1"],
        "rtol",
        "-1",
    ),
    command(
        "compare-dumps: atol NaN",
        lambda: ["compare-dumps", dump("a", x=torch.zeros(2)), dump("b", x=torch.ones(2)), "--atol", "nan"],
        "atol",
        "nan",
    ),
    command(
        "compare-dumps: torn index",
        lambda: ["compare-dumps", dump("a", text='{"module": "x"'), dump("b", x=torch.zeros(2))],
        "a/rank0/index.jsonl",
    ),
    command(
        "compare-dumps: index of another",
        lambda: ["compare-dumps", dump("a", text='{"module": "x"}\n'), dump("b", x=torch.zeros(2))],
        "a/rank0/index.jsonl",
    ),
    command("compare-dumps: torn tensor", torn_dump, "a/rank0/000000.pt"),
    command(
        "compare-dumps: a tensor that is gone",
        lambda: [
            pathlib.Path(dump("a", x=torch.zeros(2)), "rank0/000000.pt").unlink() or "compare-dumps",
            "a",
            dump("b", x=torch.zeros(2)),
        ],
        "a/rank0/000000.pt",
    ),
    command(
        "compare-dumps: a dump with itself", lambda: ["compare-dumps", dump("a", x=torch.zeros(2)), "a"], "a", "itself"
    ),
]

ROWS = TOP + EXPLAIN + PLAN + CROSS + TOOLCHAIN + FLAG_ROWS + TUNE + CALIBRATE + COMPARE

test_commands = table(ROWS)
