"""The tool chain's folder: where it is, that installing is whole or nothing, and what is said when it cannot be had."""

import json
import pathlib
import subprocess

import pytest

from mindspeed_fx import cli
from mindspeed_fx.ascend import toolchain


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A pip that puts one file into --target, or fails with ``pip.error``; ``pip.calls`` are its commands."""

    class Pip:
        calls, error, environments = [], "", []

        def run(self, command, env, **_):
            self.calls.append(command)
            self.environments.append(env)
            target = pathlib.Path(command[command.index("--target") + 1])
            (target / "ascendnpuir" / "bin").mkdir(parents=True)
            (target / "ascendnpuir" / "bin" / "tool").write_text("x" * 100)
            return subprocess.CompletedProcess(command, bool(self.error), "", self.error)

    made = Pip()
    monkeypatch.setattr(toolchain.subprocess, "run", made.run)
    monkeypatch.setenv(toolchain.VARIABLE, str(tmp_path / "chain"))
    return made


def quiet(_):
    pass


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert toolchain.root() == tmp_path / "mindspeed_fx" / "toolchain"
    monkeypatch.setenv(toolchain.VARIABLE, str(tmp_path / "named"))
    assert toolchain.root() == tmp_path / "named"
    assert toolchain.root(tmp_path / "given") == tmp_path / "given"


def test_every_version_is_pinned_and_torch_npu_matches_torch(monkeypatch):
    for component in toolchain.components():
        assert all("==" in p for p in component.packages)
    monkeypatch.setattr(toolchain.importlib.metadata, "version", lambda _: "2.11.0+cpu")
    assert toolchain.components()[0].packages == ("torch_npu==2.11.0.post3",)
    monkeypatch.setattr(toolchain.importlib.metadata, "version", lambda _: "3.0.0")
    with pytest.raises(toolchain.ToolchainError, match="no torch_npu is known for torch 3.0"):
        toolchain.components()


def test_install_is_isolated_and_idempotent(pip, monkeypatch):
    monkeypatch.setenv("PIP_USER", "1")
    rows = toolchain.install(log=quiet)
    assert [r["installed"] for r in rows] == [True] * 3 and all(r["bytes"] == 100 for r in rows)
    assert len(pip.calls) == 3
    for command, env in zip(pip.calls, pip.environments):
        assert "--no-deps" in command and "--target" in command and "PIP_USER" not in env
    tool = toolchain.path("triton_ascend") / "ascendnpuir" / "bin" / "tool"
    assert tool.stat().st_mode & 0o111
    toolchain.install(log=quiet)
    assert len(pip.calls) == 3
    assert toolchain.missing("torch_npu", "torch_mlir") is None


def test_one_component(pip):
    rows = toolchain.install(names=["torch_npu"], log=quiet)
    assert [r["name"] for r in rows] == ["torch_npu"] and len(pip.calls) == 1
    assert "mindspeed-fx toolchain install" in toolchain.missing("torch_npu", "triton_ascend")


def test_a_failed_install_leaves_nothing(pip):
    pip.error = "ERROR: Could not find a version\nERROR: No matching distribution found for torch_npu==2.13.0"
    with pytest.raises(toolchain.ToolchainError, match="no wheel of torch_npu==.* for Python"):
        toolchain.install(log=quiet)
    assert list(toolchain.root().iterdir()) == []
    with pytest.raises(toolchain.ToolchainError, match="run: mindspeed-fx toolchain install"):
        toolchain.path("torch_npu")


def test_offline(pip):
    pip.error = "WARNING: Retrying ... NewConnectionError\nERROR: No matching distribution found for torch_npu==2.13.0"
    with pytest.raises(toolchain.ToolchainError, match="cannot be reached.*PIP_FIND_LINKS"):
        toolchain.install(log=quiet)


def test_half_a_folder_is_replaced(pip):
    folder = toolchain.root() / toolchain.components()[0].folder
    folder.mkdir(parents=True)
    (folder / "left").write_text("over")
    toolchain.install(names=["torch_npu"], log=quiet)
    assert not (folder / "left").exists() and toolchain.path("torch_npu") == folder


def test_command(pip, capsys):
    assert cli.main(["toolchain", "status", "--json"]) == 1
    assert [r["installed"] for r in json.loads(capsys.readouterr().out)] == [False] * 3
    assert cli.main(["toolchain", "install", "torch_mlir"]) == 0
    assert "torch-mlir==" in capsys.readouterr().out
    assert cli.main(["toolchain", "status", "torch_np"]) == 2
    assert 'did you mean "torch_npu"?' in capsys.readouterr().err
