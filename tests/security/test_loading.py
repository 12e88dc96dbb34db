"""Nothing that is loaded runs: what could, is called nowhere in the package but where this table says why."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import pickle

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.cost import calibrated
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.sharding.plan import Plan
from mindspeed_fx.training.tensor_dump import compare_dumps

ROOT = pathlib.Path(mindspeed_fx.__file__).parent

ALLOWED = {
    ("ascend/worker.py", "pickle.loads"): "a request of the process that started it, in a folder of that user alone",
    ("ascend/ship.py", "pickle.loads"): "bytes of that request: the user's own model, packed by the same process",
    ("ascend/ship.py", "runpy.run_path"): "the script that the user named on the command line",
    ("planning/explain_command.py", "runpy.run_path"): "the script that the user named on the command line",
    ("planning/user_script.py", "runpy.run_path"): "the same, for a function of it",
    ("sharding/plan_file.py", "yaml.load"): "a SafeLoader that refuses names that come twice",
    ("kernels/triton/generate.py", "exec_module"): "a kernel that this process wrote into its own folder",
    ("megatron/device_words.py", "exec_module"): "Megatron's own files, as they are imported",
    ("backend.py", "compile"): "Inductor's function, which is called so",
    ("compat/ahead.py", "AOTCompiledFunction.deserialize"): "a file of save_compiled, which is code (docs/security.md)",
    ("sharding/expert_lists.py", "compile"): "the user's own method, whose loop chooses rows by another call",
    ("cost/naming.py", "sympy.sympify"): "what arithmetic.py read, which is no text (strict)",
}

RUNNING = (
    "eval",
    "exec",
    "compile",
    "__import__",
    "execfile",
    "exec_module",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill.load",
    "dill.loads",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "joblib.load",
    "runpy.run_path",
    "runpy.run_module",
    "os.system",
    "os.popen",
    "sympy.sympify",
    "sympy.S",
    "sympify",
    "parse_expr",
    "sympy.parse_expr",
    "lambdify",
    "sympy.lambdify",
    "AOTCompiledFunction.deserialize",
    "torch.compiler.load_compiled_function",
    "torch.jit.load",
    "torch.export.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "tempfile.mktemp",
)


def calls():
    """(file, name, call) of every call in the package."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


def test_nothing_runs_what_it_reads():
    wrong, used = [], set()
    for file, name, node in calls():
        name = "exec_module" if name.endswith(".exec_module") else name
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in RUNNING:
            used.add((file, name))
            if (file, name) not in ALLOWED:
                wrong.append(f"{file}:{node.lineno} {name}")
        if name == "sympy.sympify" and keywords.get("strict") != "True":
            wrong.append(f"{file}:{node.lineno} sympify of text")
        if name.split(".")[-1] == "load" and name.startswith(("torch", "numpy", "np")):
            if keywords.get("weights_only") != "True" and not name.startswith(("numpy", "np")):
                wrong.append(f"{file}:{node.lineno} {name} without weights_only=True")
            if keywords.get("allow_pickle") not in (None, "False"):
                wrong.append(f"{file}:{node.lineno} {name} with allow_pickle")
        if keywords.get("shell") not in (None, "False"):
            wrong.append(f"{file}:{node.lineno} a shell")
    assert not wrong, wrong
    assert used == set(ALLOWED), set(ALLOWED) - used


class Attack:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.fixture
def trap(tmp_path):
    """(file, bytes): what unpickling the bytes makes."""
    file = tmp_path / "ran"
    data = pickle.dumps(Attack(str(file)))
    pickle.loads(data).close()
    assert file.exists()
    file.unlink()
    yield file, data
    assert not file.exists()


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:builtins.open ['{file}', w]",
        "name: !!python/object/apply:os.system ['touch {file}']\nmesh: [tp]",
        "name: a\nmesh: [!!python/object/new:builtins.open ['{file}', w]]",
    ],
)
def test_a_plan_in_yaml_runs_nothing(trap, tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text.format(file=trap[0]))
    with pytest.raises(Exception, match="python/object"):
        Plan.load(str(path))


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_plan_that_is_a_pickle_runs_nothing(trap, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(trap[1])
    with pytest.raises((ValueError, Exception)) as error:
        Plan.load(str(path))
    assert not isinstance(error.value, AssertionError)


def test_a_table_runs_nothing(trap, tmp_path, monkeypatch):
    monkeypatch.setenv("MINDSPEED_FX_HARDWARE", str(tmp_path))
    path = calibrated.path_of("cpu", calibrated.device_name("cpu"))
    for data in (
        trap[1],
        json.dumps({"format": 1, "constants": {"launch": {"value": f"open('{trap[0]}', 'w')"}}}).encode(),
        json.dumps({"format": 1, "constants": {}, "measured": [{"operator": f"open('{trap[0]}', 'w')"}]}).encode(),
    ):
        path.write_bytes(data)
        with pytest.warns(UserWarning, match="is no calibrated table"):
            assert calibrated.find("cpu") is None
        assert calibrated.every() == []


def test_options_run_nothing(trap):
    with pytest.raises(OptionError):
        Options.parse(None, environ={"MINDSPEED_FX_OPTIONS": trap[1].decode("latin-1")})
    with pytest.raises(OptionError):
        Options.parse(None, environ={"MINDSPEED_FX_OPTIONS": f"__import__('os').system('touch {trap[0]}')"})


def dumped(folder, file, tensor):
    rank = folder / "rank0"
    rank.mkdir(parents=True)
    row = {"module": "m", "call": 0, "output": 0, "kind": "forward", "file": file}
    (rank / "index.jsonl").write_text(json.dumps(row) + "\n")
    if tensor is not None:
        torch.save(tensor, rank / "000000.pt")


def test_a_dumped_tensor_that_is_a_pickle_runs_nothing(trap, tmp_path):
    dumped(tmp_path / "a", "000000.pt", torch.ones(2))
    dumped(tmp_path / "b", "000000.pt", torch.ones(2))
    assert [d.is_beyond for d in compare_dumps(tmp_path / "a", tmp_path / "b")] == [False]
    (tmp_path / "b" / "rank0" / "000000.pt").write_bytes(trap[1])
    with pytest.raises(ValueError, match="UnpicklingError"):
        compare_dumps(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("file", ["../../secret.pt", "/etc/passwd", "x/000000.pt", "000000.pt/../../../secret.pt", ""])
def test_an_index_names_files_of_its_folder_alone(tmp_path, file):
    torch.save(torch.ones(2), tmp_path / "secret.pt")
    dumped(tmp_path / "a", "000000.pt", torch.ones(2))
    dumped(tmp_path / "b", file, None)
    with pytest.raises(ValueError, match="valid: names of files that dump_tensors writes"):
        compare_dumps(tmp_path / "a", tmp_path / "b")


def test_the_requests_of_the_other_process_lie_in_a_folder_of_this_user_alone(monkeypatch):
    """They are pickles: ALLOWED rests on it."""
    from mindspeed_fx.ascend import compile as cross

    seen = {}

    def run(command, **_):
        asked = pathlib.Path(command[3])
        seen["mode"], seen["owner"] = asked.parent.stat().st_mode & 0o777, asked.stat().st_uid
        raise cross.subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(cross.subprocess, "run", run)
    with pytest.raises(cross.CrossError, match="not done within"):
        cross._ask({}, {"PYTHONPATH": ""}, 1)
    assert seen == {"mode": 0o700, "owner": os.getuid()}
