"""The tool chain: what pip may install, and where what is installed may lie."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from mindspeed_fx.ascend import toolchain, wheel_hashes


def every_requirement():
    packages = {p for c in toolchain.components() for p in c.packages if not p.startswith("torch_npu")}
    return sorted(packages | {f"torch_npu=={v}" for v in toolchain.TORCH_NPU.values()})


@pytest.mark.parametrize("requirement", every_requirement())
def test_every_version_has_the_hashes_of_its_wheels(requirement):
    rows = wheel_hashes.HASHES[requirement]
    assert all(len(digest) == 64 and int(digest, 16) for digest in rows.values())
    assert len(set(rows.values())) == len(rows)
    for machine in ("x86_64", "aarch64"):
        assert any(tags.endswith((machine, "any")) for tags in rows)


def wheel(folder, text="x = 1\n"):
    """A wheel that pip installs on this machine."""
    name, version = "pybind11", "3.1.0"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", text)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def component(tmp_path, monkeypatch):
    made = toolchain.Component("small", ("pybind11==3.1.0",), "this test")
    monkeypatch.setattr(toolchain, "components", lambda: (made,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return made


def test_a_wheel_with_another_hash_is_not_installed(component, tmp_path):
    wheel(tmp_path, "raise SystemExit('ran')\n")
    with pytest.raises(toolchain.ToolchainError, match="not the wheel that mindspeed_fx knows .its sha256 differs"):
        toolchain.install(tmp_path / "chain", log=lambda line: None)
    assert list((tmp_path / "chain").iterdir()) == []


def test_the_wheel_that_is_known_is_installed(component, tmp_path, monkeypatch):
    digest = hashlib.sha256(wheel(tmp_path).read_bytes()).hexdigest()
    monkeypatch.setitem(wheel_hashes.HASHES, "pybind11==3.1.0", {"py3-none-any": digest})
    (row,) = toolchain.install(tmp_path / "chain", log=lambda line: None)
    assert row["installed"] and pathlib.Path(row["folder"], "pybind11", "__init__.py").is_file()


def put_mark(tmp_path, component, text='{"bytes": 1, "seconds": 1}'):
    folder = tmp_path / "chain" / component.folder
    folder.mkdir(parents=True)
    (folder / "mindspeed_fx.json").write_text(text)
    return folder


@pytest.mark.parametrize("text", ["", '{"bytes": 1', "[]", "\0\0\0\0"])
def test_a_torn_mark_is_no_installation(component, tmp_path, text):
    put_mark(tmp_path, component, text)
    assert not toolchain.status(tmp_path / "chain")[0]["installed"]
    with pytest.raises(toolchain.ToolchainError, match="is not installed"):
        toolchain.path("small", tmp_path / "chain")


@pytest.mark.parametrize("inner", [False, True])
def test_where_anybody_may_write_nothing_is_run(component, tmp_path, inner):
    folder = put_mark(tmp_path, component)
    assert toolchain.path("small", tmp_path / "chain") == folder
    (folder if inner else folder.parent).chmod(0o777)
    with pytest.raises(toolchain.ToolchainError, match="anybody may write into"):
        toolchain.path("small", tmp_path / "chain")


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="root alone may give folders away")
def test_the_default_place_of_another_user_is_not_run(component, tmp_path, monkeypatch):
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = toolchain.root() / component.folder
    folder.mkdir(parents=True)
    (folder / "mindspeed_fx.json").write_text("{}")
    assert toolchain.path("small") == folder
    os.chown(folder, 12345, 12345)
    with pytest.raises(toolchain.ToolchainError, match="belongs to another user .12345"):
        toolchain.path("small")
    assert "another user" in toolchain.missing("small")
    monkeypatch.setenv(toolchain.VARIABLE, str(toolchain.root()))  # the user says so: an administrator's
    assert toolchain.path("small") == folder


def test_the_default_place_is_private(component, tmp_path, monkeypatch):
    monkeypatch.delenv(toolchain.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(wheel(tmp_path).read_bytes()).hexdigest()
    monkeypatch.setitem(wheel_hashes.HASHES, "pybind11==3.1.0", {"py3-none-any": digest})
    toolchain.install(log=lambda line: None)
    for folder in (tmp_path / "cache", tmp_path / "cache" / "mindspeed_fx", toolchain.root()):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


def test_setuptools_works_after_an_installation():
    """Looking for pip's module turns setuptools' hooks off, and Inductor's builder imports it."""
    code = "from mindspeed_fx.ascend import toolchain; toolchain.require_pip(); import setuptools, distutils.core"
    subprocess.run([sys.executable, "-c", code], check=True)
