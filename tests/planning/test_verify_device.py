"""mindspeed-fx verify-device: all that is registered is run, what is wrong fails, and what is cut short goes on."""

import json
import os
import sys

import pytest
import torch
import torch.distributed as dist

from mindspeed_fx import cli
from mindspeed_fx.errors import OptionError
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels.base import ADOPTED, Lowering
from mindspeed_fx.passes.manager import ROWS
from mindspeed_fx.planning.verify_device import (
    Journal,
    calls,
    checks,
    collectives,
    compare,
    fusions,
    operators,
    page,
    supervise,
    times,
    verify_device,
)
from mindspeed_fx.planning.verify_device.place import Place
from tests import forks, ranks

ops = torch.ops.mindspeed


def by_key(content):
    return {r["key"]: r for r in content["results"]}


def test_keys_are_unique():
    for target in ("cpu", "npu"):
        keys = [c.key for c in checks.checks(target, (torch.float32,))]
        assert len(set(keys)) == len(keys) > 400


def test_every_operator_kernel_and_fusion_has_a_check():
    """Kernels in Triton run where their operators' kernels do."""
    seen = set()
    for dtype in (torch.float32, torch.bfloat16):
        seen |= {
            op.overload for family in operators.FAMILIES for op, _ in operators.calls_of(family, checks.SIZES, dtype)
        }
        seen |= {op.default for family in calls.FAMILIES for _, op, *_ in calls.cases(family, dtype)}
    known = {o.overload: o.name for o in (*REGISTRY.values(), *ADOPTED.values())}
    left = {n for o, n in known.items() if o not in seen and not n.endswith("_triton")}
    assert left == set(collectives.OPERATORS)  # with other ranks
    of_fusions = {n for n in ROWS if n.startswith(("fusion.", "canonicalize."))}
    assert of_fusions == {f.name for f in fusions.FUSIONS} | set(fusions.WITHOUT_GRAPH)


def test_kernels_of_npu_are_run_by_emulation(tmp_path):
    out = str(tmp_path / "npu.json")
    content = verify_device("npu", emulated=True, out=out, kinds=("operator", "kernel"), dtypes=("bfloat16",))
    kernels = [r for r in content["results"] if r["kind"] == "kernel"]
    assert content["counts"]["failed"] == 0, [r for r in content["results"] if r["state"] == "failed"]
    assert content["schema"] == 1 and content["finished"] and content["is_emulated"] and content["versions"]["torch"]
    served = {r["name"].split(": ")[1] for r in kernels if r["state"] == "passed"}
    alone = [o for o in (*REGISTRY.values(), *ADOPTED.values()) if o.name not in collectives.OPERATORS]
    every = {k.kernel for o in alone for k in o.lowerings.get("npu", ())}
    assert served == every - {"aten addmm_"}  # that one is for float32
    assert all(r["error"] <= r["tolerance"] for r in kernels if r["state"] == "passed" and r["tolerance"])
    assert json.loads((tmp_path / "npu.json").read_text()) == content and not (tmp_path / "npu.json.journal").exists()


def test_fusions_of_npu_are_run_by_emulation(tmp_path):
    content = verify_device("npu", emulated=True, out=str(tmp_path / "f.json"), kinds=("fusion",), dtypes=("bfloat16",))
    assert content["counts"]["failed"] == 0, [r for r in content["results"] if r["state"] == "failed"]
    assert {r["name"] for r in content["results"]} == {
        f.name for f in fusions.FUSIONS if "npu" in f.targets and f.dtypes != fusions.FLOATS
    }
    assert all(r["sites"] for r in content["results"])


@pytest.mark.parametrize("kind", ["operator", "kernel"])
def test_a_processor(tmp_path, kind):
    """Of both kinds a part; the fusions' compilations are in the slow test."""
    only = "(norm|attention|attention_backward|linear|gemm|product|rule|rope) 1.*bfloat16"
    content = verify_device("cpu", out=str(tmp_path / "cpu.json"), kinds=(kind,), only=only)
    assert content["counts"]["failed"] == 0, [r for r in content["results"] if r["state"] == "failed"]
    assert content["counts"]["passed"] > 2 and not content["is_emulated"] and content["target"] == "cpu"


def test_a_step_that_forgets_a_moment_fails(tmp_path, monkeypatch):
    """What an operator writes to any of its arguments is compared, a list of tensors too."""
    run = checks._results

    def forgets(function, operator, args):
        results = run(function, operator, args)
        if function is operator.overload:
            results[4] = args[1][1]  # the second weight's first moment, as it was
        return results

    for planted, failed in ((run, 0), (forgets, 4)):
        monkeypatch.setattr(checks, "_results", planted)
        content = verify_device("cpu", out=str(tmp_path / f"{failed}.json"), kinds=("operator",), only="adamw_step")
        assert content["counts"]["failed"] == failed and len(content["results"]) == 4, content["results"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_processor_whole(tmp_path, capsys):
    words = ["verify-device", "--device=cpu", "--in-process", "--small", f"--out={tmp_path / 'cpu.json'}"]
    assert cli.main(words) == 0, capsys.readouterr().err
    content = json.loads((tmp_path / "cpu.json").read_text())
    assert content["finished"] and {r["kind"] for r in content["results"]} == {
        "operator",
        "kernel",
        "fusion",
        "time",
        "collective",
    }


def plant(monkeypatch, name, build):
    """A kernel of ``name`` for cpu."""
    operator = REGISTRY[getattr(ops, name).default]
    kernel = Lowering("a planted kernel", build, lambda *args: None)
    monkeypatch.setattr(operator, "lowerings", {**operator.lowerings, "cpu": [kernel]})


@pytest.mark.parametrize("wrong", ["value", "type", "result", "crash", "infinite"])
def test_a_wrong_kernel_fails(tmp_path, monkeypatch, capsys, wrong):
    def build(x, weight, eps, cast_first):
        y, rstd = REGISTRY[ops.rms_norm.default].reference(x, weight, eps, cast_first)
        if wrong == "crash":
            raise RuntimeError("aicore timeout")
        return {
            "value": (y * (1 + 1e-3), rstd),
            "type": (y.double(), rstd),
            "result": (y,),
            "infinite": (y / 0, rstd),
        }[wrong]

    plant(monkeypatch, "rms_norm", build)
    out = tmp_path / "wrong.json"
    words = ["verify-device", "--in-process", "--device=cpu", "--kinds=kernel", "--only=/rms_norm ", f"--out={out}"]
    assert cli.main([*words, "--dtypes=float32"]) == 1
    content = json.loads(out.read_text())
    assert content["counts"] == {"passed": 0, "failed": 2, "not run": 0}
    problem = content["results"][0]["problem"]
    expected = {
        "value": "off by 1.00e-03",
        "type": "torch.float64",
        "result": "1 results for 2",
        "crash": "RuntimeError: aicore timeout (test_verify_device.py",
        "infinite": "are not finite",
    }
    assert expected[wrong] in problem
    assert "failed\n  kernel/rms_norm 1: a planted kernel/float32: " in page.text(content)


def test_a_wrong_gradient_of_a_fusion_fails(tmp_path, monkeypatch):
    def build(grad, x, weight, rstd, cast_first, need_weight):
        dx, dw = REGISTRY[ops.rms_norm_backward.default].reference(grad, x, weight, rstd, cast_first, need_weight)
        return dx, dw * 1.001

    plant(monkeypatch, "rms_norm_backward", build)
    fusion = next(f for f in fusions.FUSIONS if f.name == "fusion.rms_norm")
    place = Place("cpu", torch.device("cpu"), "cpu", is_emulated=True)  # codegen eager
    assert "result 2: off by 1.00e-03" in checks._run_fusion(fusion, torch.float32, place).problem


def test_a_pass_that_does_nothing_fails():
    fusion = fusions.Fusion("fusion.rms_norm", lambda x: x * 2, lambda s, t: (torch.ones(2, 4, requires_grad=True),))
    place = Place("cpu", torch.device("cpu"), "cpu", is_emulated=True)
    assert "the pass did nothing" in checks._run_fusion(fusion, torch.float32, place).problem


def test_dropout_that_keeps_otherwise_backward_fails():
    x, residual = torch.randn(64, 64), torch.randn(64, 64)
    keep = torch.rand(64, 64) < 0.75
    y = residual + torch.where(keep, x / 0.75, 0.0)
    assert fusions.kept_alike(y, keep / 0.75, x, residual) is None
    assert "do not keep the same" in fusions.kept_alike(y, (keep ^ (x > 2)) / 0.75, x, residual)
    fewer = torch.rand(64, 64) < 0.5
    assert "expected 0.75" in fusions.kept_alike(residual + fewer * x / 0.75, fewer / 0.75, x, residual)


def test_what_had_no_time_is_run_by_the_next(tmp_path):
    out = str(tmp_path / "part.json")
    given = dict(out=out, kinds=("operator",), only="/rms_norm", dtypes=("float32",))
    first = verify_device("cpu", minutes=1e-9, **given)
    assert not first["finished"] and {r["reason"] for r in first["results"]} == {"no time"}
    assert "goes on where this one ended" in page.text(first)
    seen = []
    second = verify_device("cpu", progress=seen.append, **given)
    assert second["finished"] and len(seen) == len(first["results"]) == second["counts"]["passed"]


def test_a_check_that_ended_its_process_has_failed(tmp_path):
    about = {"device": "a"}
    journal = Journal(str(tmp_path / "f.json"), about)
    journal.start("kernel/a/float32")
    journal.finish("kernel/a/float32", "passed")
    journal.start("kernel/b/float32")
    with journal.path.open("a") as file:
        file.write('{"result": {"ke')
    again = Journal(str(tmp_path / "f.json"), about)
    assert {k: r["state"] for k, r in again.results.items()} == {
        "kernel/a/float32": "passed",
        "kernel/b/float32": "failed",
    }
    ended = again.results["kernel/b/float32"]
    assert "ended the process" in ended["problem"]
    assert (ended["kind"], ended["name"], ended["dtype"]) == ("kernel", "b", "float32")
    (late,) = [r for r in again.save(["fusion/c: d/e/bfloat16"])["results"] if r["state"] == "not run"]
    assert (late["kind"], late["name"], late["dtype"]) == ("fusion", "c: d/e", "bfloat16")
    assert not Journal(str(tmp_path / "f.json"), {"device": "b"}).results
    assert not Journal(str(tmp_path / "f.json"), {"device": "b"}, fresh=True).results


PLANTED = """
import os, sys, time
from mindspeed_fx import cli
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.kernels.base import Lowering
import torch
def build(*args):
    if args[1] is None:
        time.sleep(600)
    os._exit(139)
REGISTRY[torch.ops.mindspeed.rms_norm.default].lowerings["cpu"] = [Lowering("planted", build, lambda *args: None)]
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_kernels_that_end_or_hold_their_process_do_not_end_the_run(tmp_path):
    script, out = tmp_path / "planted.py", tmp_path / "ended.json"
    script.write_text(PLANTED)
    words = ["verify-device", "--in-process", "--device=cpu", "--kinds=kernel", "--dtypes=float32", f"--out={out}"]
    words += ["--only=/(rms_norm|layer_norm) [12]"]
    assert supervise.run(words, str(out), 5.0, (sys.executable, str(script)), check_seconds=20.0) == 0
    content = json.loads(out.read_text())
    assert content["finished"]
    states = {r["name"]: (r["state"], r.get("problem")) for r in content["results"]}
    for number in (1, 2):
        assert states[f"rms_norm {number}: planted"] == ("failed", "ended the process that ran it")
        assert states[f"layer_norm {number}: aten, one read of a row"][0] == "passed"


def test_times_stand_beside_the_unfused_form_and_the_model(monkeypatch):
    monkeypatch.setattr(times, "SECONDS", 0.0)
    place = Place("npu", torch.device("cpu"), "ascend910b2", is_emulated=True)
    every = {c.name: c for c in times.checks("npu", torch.float32, is_small=True)}
    rows = every["fusion.rms_norm"].run(place).detail["rows"] + every["kernels of layers"].run(place).detail["rows"]
    assert {"fusion.rms_norm", "rms_norm", "rms_norm_backward", "add_layer_norm_backward"} <= {r["name"] for r in rows}
    assert all(r["seconds"] > 0 and r["unfused_seconds"] > 0 and r["model_seconds"] > 0 for r in rows)
    assert {r["kernel"] for r in rows if r["name"] == "rms_norm"} == {"npu_rms_norm"}


def run_rank(rank, folder, port, planted):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if planted:
        gathered, wanted = collectives.KINDS["all_gather"]
        collectives.KINDS["all_gather"] = (lambda x: gathered(x).flip(0), wanted)
    words = ["verify-device", "--device=cpu", "--kinds=collective,operator", "--only=collective|/gemm"]
    code = cli.main([*words, f"--out={folder / 'ranks.json'}"])
    assert not dist.is_initialized()
    (folder / f"{rank}.txt").write_text(str(code))


@pytest.mark.parametrize("planted", [False, True])
def test_collectives_of_two_ranks(tmp_path, planted):
    ranks.spawn(run_rank, (tmp_path, str(forks.free_port()), planted))
    content = json.loads((tmp_path / "ranks.json").read_text())
    results = by_key(content)
    assert [(tmp_path / f"{r}.txt").read_text() for r in range(2)] == [str(int(planted)), "0"]
    assert {r["name"] for r in results.values() if r["kind"] == "collective"} == {
        *collectives.KINDS,
        *collectives.OPERATORS,
    }
    assert {k for k, r in results.items() if r["state"] == "failed"} == (
        {f"collective/all_gather/{t}" for t in ("float32", "bfloat16", "int64")} if planted else set()
    )
    timed = [r for r in results.values() if r["name"] in collectives.KINDS]
    assert len(timed) == 18 and all(r["seconds"] > 0 and r["model_seconds"] > 0 for r in timed)
    assert "operator/gemm 1/float32" in results and "modelled" in page.text(content)


def test_operators_that_multiply_and_communicate_have_checks_on_npu():
    names = {c.name for c in collectives.checks("npu", (torch.bfloat16,)) if c.name.startswith("npu::")}
    from mindspeed_fx.passes.overlap.mc2 import OPERATORS

    assert names == {f"npu::{n}" for n in OPERATORS.values()}


def test_wrong_arguments(tmp_path):
    out = str(tmp_path / "x.json")
    for given, words in (
        ({"target": "tpu"}, "device is 'tpu'; valid: cpu, cuda, npu"),
        ({"target": "npu"}, 'device is "npu", and there is none here'),
        ({"kinds": ("kernels",)}, "kinds is 'kernels'; valid: operator"),
        ({"dtypes": ("float32", "float32")}, "each once"),
        ({"minutes": 0}, "minutes is 0; valid: a number above 0"),
        ({"only": "("}, "no regular expression"),
    ):
        with pytest.raises(OptionError, match=".*") as error:
            verify_device(**{"target": "cpu", "out": out, **given})
        assert words in str(error.value)
    assert cli.main(["verify-device", "--out=/nowhere/x.json"]) == 2


def test_strides_and_expansions_travel():
    place = Place("cuda", torch.device("meta"), None)
    x = torch.randn(4, 6, 5).transpose(0, 2).requires_grad_()
    wide = torch.randn(3, 1).expand(3, 7)
    there, expanded, number = place.send((x, wide, 3))
    assert there.stride() == x.stride() and there.shape == x.shape and there.requires_grad and number == 3
    assert expanded.shape == (3, 7) and expanded.stride(1) == 0


def test_errors_are_of_the_largest_element():
    truth = torch.tensor([1.0, -100.0], dtype=torch.float64)
    have = [torch.tensor([1.5, -100.0])]
    result = compare.compare(have, [truth.float()], [truth])
    assert result.error == pytest.approx(0.005) and result.problem is not None
    assert compare.compare(have, [truth.float() + 0.4], [truth]).problem is None  # the reference is as far off
    assert compare.compare([torch.tensor([1, 2])], [torch.tensor([1, 3])], [torch.tensor([1, 3])]).problem
