"""Stub libraries: built from ELF tables, never where CANN is real, and enough for torch_npu in a process of its own."""

import os
import shutil
import subprocess
import sys

import pytest

from mindspeed_fx.ascend import elf, stub, toolchain

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler")
needs_torch_npu = pytest.mark.skipif(
    toolchain.missing("torch_npu") is not None, reason=str(toolchain.missing("torch_npu"))
)


@needs_compiler
def test_what_a_library_wants(tmp_path):
    source, library = tmp_path / "a.c", tmp_path / "liba.so"
    source.write_text("extern int aclrtSomething(int); int mine(void) { return aclrtSomething(1); }")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library), "-Wl,--no-as-needed", "-lm"], check=True)
    libraries, symbols = elf.read_needed(library)
    assert "libm.so.6" in libraries and "aclrtSomething" in symbols and "mine" not in symbols
    with pytest.raises(ValueError, match="is not an ELF file"):
        elf.read_needed(source)


@pytest.mark.parametrize("name", ["ASCEND_HOME_PATH", "ASCEND_OPP_PATH"])
def test_refused_where_cann_is_real(monkeypatch, name):
    monkeypatch.setenv(name, "/usr/local/Ascend")
    with pytest.raises(stub.StubError, match=f"never stubbed where it is real: {name} is set"):
        stub.environment()


def test_unknown_soc():
    with pytest.raises(stub.StubError, match=r'no SoC "Ascend910B9" \(did you mean "Ascend910B'):
        stub.environment("Ascend910B9")


@pytest.mark.npu
@needs_torch_npu
@needs_compiler
def test_built_and_torch_npu_is_imported(monkeypatch, tmp_path):
    package = toolchain.path("torch_npu") / "torch_npu"
    monkeypatch.setenv("CC", "cc")
    (tmp_path / "stubs").mkdir()
    stub._compile(package, tmp_path / "stubs", "Ascend910B3", 2)
    code = (
        "import torch, torch_npu; print(torch.npu.device_count(), torch.npu.get_soc_version(), "
        "hasattr(torch.ops.npu, 'npu_fusion_attention_v3'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **stub.environment("Ascend910B3", 2)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines()[-1].split()[::2] == ["2", "True"], run.stdout + run.stderr
