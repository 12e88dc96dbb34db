"""A step that one process compiled and another one loads: values, gradients, guards, and files that do not fit."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.arguments import ArgumentError
from mindspeed_fx.compat import ahead, kernel_library
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning import saved_file

pytestmark = pytest.mark.skipif(bool(ahead.problem()), reason="this torch writes no compiled functions")

PROGRAM = """
import torch
from torch import nn

SCALE = 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.part = nn.Linear(16, 16), 0.5

    def forward(self, x):
        return x + self.part * nn.functional.silu(self.up(x))


def make():
    torch.manual_seed(0)
    return Block(), torch.randn(4, 16)


def step(model, x):
    return SCALE * model(x).square().mean()
"""

SECOND_PROCESS = """
import json, sys
import torch
import mindspeed_fx, saved_program
import torch._dynamo.utils as utils
from mindspeed_fx.compat import kernel_library

started = []

def note(event, args):
    if event == "subprocess.Popen" and "--version" not in args[1]:  # which is asked of the compiler
        started.append(args[1])

sys.addaudithook(note)
if sys.argv[2] == "alone":
    kernel_library.can_join = lambda: False
model, x = saved_program.make()
loaded = mindspeed_fx.load_compiled(saved_program.step, sys.argv[1])
loss = loaded(model, x)
loss.backward()
gradient = model.up.weight.grad.clone()
model.zero_grad()
expected = saved_program.step(model, x)
expected.backward()
torch.testing.assert_close(loss, expected)
torch.testing.assert_close(gradient, model.up.weight.grad)
print(json.dumps([loaded.reason, loaded.misses, utils.counters["frames"].get("total", 0), started]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    (folder / "saved_program.py").write_text(PROGRAM)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("saved_program", None)


@pytest.fixture(scope="module")
def program(folder):
    import saved_program

    return saved_program


@pytest.fixture(scope="module")
def path(folder, program):
    model, x = program.make()
    path = folder / "step.mfx"
    mindspeed_fx.save_compiled(program.step, path, (model, x))
    return path


def load(step, path, **settings):
    """The step, and why its file was not taken."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = mindspeed_fx.load_compiled(step, path, **settings)
    told = [str(w.message) for w in caught if str(path) in str(w.message)]
    assert bool(told) == (loaded.reason is not None)
    return loaded


@pytest.mark.parametrize("kernels", ["together", "alone"])
def test_another_process_runs_it_without_compiling_anything(kernels, folder, program, path, tmp_path, monkeypatch):
    if kernels == "alone":
        monkeypatch.setattr(kernel_library, "can_join", lambda: False)
        path = tmp_path / "alone.mfx"
        mindspeed_fx.save_compiled(program.step, path, program.make())
    paths = os.pathsep.join([str(folder), *sys.path])
    environ = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SECOND_PROCESS, str(path), kernels]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, [], 0, []]


def test_arguments_that_its_guards_refuse_are_compiled_anew(path, program, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        "mindspeed_fx.planning.saved_step.compile_with_backend",
        lambda step, **_: lambda *args: compiled.append(args) or step(*args),
    )
    model, x = program.make()
    loaded = load(program.step, path)
    loaded(model, x).backward()
    assert loaded.reason is None and not compiled

    with torch.no_grad():
        loaded(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        loaded(model, x)
    loaded(model, x[:3])
    loaded(model.double(), x.double())
    model.float()
    monkeypatch.setattr(program, "SCALE", 3.0)
    torch.testing.assert_close(loaded(model, x), program.step(model, x))
    assert len(compiled) == 5 == len(loaded.misses)
    for miss, expected in zip(loaded.misses, ("grad_mode", "autocast", "size mismatch", "dtype mismatch", "SCALE")):
        assert expected in miss.replace("Double", "dtype mismatch"), (miss, expected)


def closed_over(program):
    model, x = program.make()

    def step(x):
        return model(x).square().mean()

    return step, (x,), model


def method(program):
    model, x = program.make()
    return model.forward, (x,), model


def module(program):
    model, x = program.make()
    return model, (x,), model


def compiled_module(program):
    model, x = program.make()
    return torch.compile(model, backend="mindspeed"), (x,), model


@pytest.mark.parametrize("make", [closed_over, method, module, compiled_module], ids=lambda make: make.__name__)
def test_kinds_of_steps(make, program, tmp_path):
    step, args, model = make(program)
    plain = getattr(step, "_orig_mod", step)
    plain(*args).sum().backward()
    kept = model.up.weight.grad
    mindspeed_fx.save_compiled(step, tmp_path / "step.mfx", args)
    assert model.up.weight.grad is kept
    loaded = load(step, tmp_path / "step.mfx")
    model.up.weight.grad = None
    out = loaded(*args)
    out.sum().backward()
    assert loaded.reason is None and not loaded.misses
    torch.testing.assert_close(out, plain(*args))
    torch.testing.assert_close(model.up.weight.grad, kept)


def test_both_steps_run_what_was_compiled(program, path, tmp_path):
    """The one that was saved, which Dynamo has made names for in this process, and the one that was loaded."""
    model, x = program.make()
    saved = mindspeed_fx.save_compiled(program.step, tmp_path / "step.mfx", (model, x))
    for step in (saved, load(program.step, tmp_path / "step.mfx"), load(program.step, path)):
        with torch.profiler.profile() as profile:
            step(model, x)
        assert not step.misses and not {e.name for e in profile.events()} & {"aten::silu", "aten::sigmoid", "aten::mul"}


def test_variables_mean_what_they_mean_when_it_is_called(program, tmp_path):
    model, x = program.make()

    def step(x):
        return model(x).square().mean()

    mindspeed_fx.save_compiled(step, tmp_path / "step.mfx", (x,))
    loaded = load(step, tmp_path / "step.mfx")
    model, _ = program.make()
    with torch.no_grad():
        model.up.weight.zero_()
    torch.testing.assert_close(loaded(x), step(x))
    assert not loaded.misses


@pytest.mark.slow
def test_sizes_that_are_symbols_serve_others(program, tmp_path):
    model, x = program.make()
    mindspeed_fx.save_compiled(program.step, tmp_path / "step.mfx", (model, x), dynamic=True)
    loaded = load(program.step, tmp_path / "step.mfx", dynamic=True)
    for rows in (4, 7, 32):
        torch.testing.assert_close(loaded(model, torch.ones(rows, 16)), program.step(model, torch.ones(rows, 16)))
    assert not loaded.misses


def rewritten(path, target, change):
    """A copy of a file whose header ``change`` was called with."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == saved_file.HEADER:
                header = json.loads(data)
                change(header)
                data = json.dumps(header).encode()
            new.writestr(name, data)
    return target


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda header: header["versions"].update(torch="2.11.0"), "torch was '2.11.0' and is"),
        (lambda header: header["versions"].update(mindspeed_fx="0.0"), "mindspeed_fx was '0.0' and is"),
        (lambda header: header["machine"].update(threads=64), "threads was 64 and is"),
        (lambda header: header["machine"].update(processor="another"), "processor was 'another' and is"),
        (lambda header: header["options"].update(level=0), 'option "level" was 0 and is'),
        (lambda header: header.update(identity="other"), "sources of mindspeed_fx"),
        (lambda header: header.update(format=0), "another format"),
        (lambda header: header.update(dynamic=True), "dynamic was True and is None"),
        (lambda header: header.update(program="0"), "program is torn"),
        (lambda header: header["code"][0].__setitem__(3, "0"), "is not the code that it was made from"),
    ],
)
def test_a_stale_file_is_named_with_the_difference(path, program, tmp_path, change, expected):
    loaded = load(program.step, rewritten(path, tmp_path / "stale.mfx", change))
    assert expected in loaded.reason


def test_code_that_was_edited_makes_it_stale(path, program, folder):
    source = folder / "saved_program.py"
    try:
        source.write_text(PROGRAM.replace("silu", "gelu"))
        assert re.search("saved_program, lines .* is not the code", load(program.step, path).reason)
    finally:
        source.write_text(PROGRAM)
    assert load(program.step, path).reason is None


def test_a_torn_or_missing_file_costs_the_compilation(path, program, tmp_path):
    torn = tmp_path / "torn.mfx"
    torn.write_bytes(path.read_bytes()[:-200])
    assert "torn" in load(program.step, torn).reason
    assert "no such file" in load(program.step, tmp_path / "missing.mfx").reason
    torn.write_bytes(b"PK and more")
    assert "torn, or no file of save_compiled" in load(program.step, torn).reason


@pytest.mark.slow
def test_a_step_whose_file_is_stale_runs(program, tmp_path):
    model, x = program.make()
    loaded = load(program.step, tmp_path / "missing.mfx")
    torch.testing.assert_close(loaded(model, x), program.step(model, x))


def test_nothing_is_read_where_anybody_may_write(path, program):
    os.chmod(path, 0o666)
    try:
        assert "anybody may write" in load(program.step, path).reason
    finally:
        os.chmod(path, 0o600)


def test_a_file_writes_libraries_into_the_cache_alone(path, program, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(ahead, "cache_directory", lambda: str(cache))
    copy = rewritten(path, tmp_path / "more.mfx", lambda header: None)
    with zipfile.ZipFile(copy, "a") as archive:
        for name in ("../../outside.so", "/outside.so", "ab/../../outside.so", "ab/program.py"):
            archive.writestr(saved_file.LIBRARIES + name, b"x")
    saved_file.read_program(copy, saved_file.read_header(copy))
    written = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()} - {"more.mfx"}
    assert written and all(re.fullmatch(r"cache/(\w\w|mindspeed_fx)/[\w.-]+\.so", name) for name in written)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (dict(options={"codegen": "eager"}), OptionError, 'option "codegen" is "eager"'),
        (dict(options={"check": "each"}), OptionError, "cannot be kept: check was asked for"),
        (dict(step=3), ArgumentError, "a module or function is expected"),
        (dict(step=max), ArgumentError, "a module, a function or a method is expected"),
        (dict(args=(1,)), ArgumentError, "does not take these args"),
        (dict(step=torch.compile(nn.Linear(2, 2), backend="eager")), OptionError, "compiled by another backend"),
        (dict(path="."), ArgumentError, "is a directory"),
    ],
)
def test_what_cannot_be_saved(program, tmp_path, call, error, text):
    arguments = {"step": program.step, "path": tmp_path / "step.mfx", "args": program.make(), **call}
    with pytest.raises(error, match=text):
        mindspeed_fx.save_compiled(**arguments)
    assert not pathlib.Path(tmp_path, "step.mfx").exists()


def test_options_of_a_compiled_function_are_its_own(program, tmp_path):
    compiled = torch.compile(program.step, backend="mindspeed", options={"check": "each"})
    with pytest.raises(OptionError, match="check was asked for"):
        mindspeed_fx.save_compiled(compiled, tmp_path / "step.mfx", program.make())


def test_an_object_that_no_file_holds(tmp_path):
    lock = __import__("threading").Lock()

    def step(x, held):
        return x * 2 if held is not None else x

    with pytest.raises(OptionError, match="cannot be kept in a file"):
        mindspeed_fx.save_compiled(step, tmp_path / "step.mfx", (torch.ones(2), lock))
