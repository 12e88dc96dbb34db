"""What the layout of the package promises: files register themselves, and torch's internals stay behind compat."""

import ast
import sys
from pathlib import Path

import pytest

import mindspeed_fx
from mindspeed_fx.kernels import REGISTRY
from mindspeed_fx.modules import import_all
from mindspeed_fx.passes import registered

ROOT = Path(mindspeed_fx.__file__).parent
INTERNALS = (
    "torch._C",
    "torch._functorch",
    "torch._inductor",
    "torch._guards",
    "torch._subclasses",
    "torch._higher_order_ops",
    "torch._logging",
    "torch._dynamo.config",
    "torch._dispatch",
)


@pytest.mark.parametrize("folder", ["kernels", "kernels/cpu", "kernels/npu", "passes/fusion", "passes/canonicalize"])
def test_every_file_of_the_folder_is_imported(folder):
    package = f"mindspeed_fx.{folder.replace('/', '.')}"
    files = {f"{package}.{p.stem}" for p in (ROOT / folder).glob("*.py") if p.stem != "__init__"}
    assert len(files) > 4 and not files - set(sys.modules)


def test_every_operator_and_pass_is_there():
    names = {p.name for p in registered()}
    assert {"fusion.rms_norm", "fusion.attention", "fusion.moe_permute", "overlap.schedule"} <= names
    assert {"rms_norm", "weighted_swiglu", "ring_attention_update"} <= {o._schema.name.split("::")[1] for o in REGISTRY}
    assert [n for n in REGISTRY if "npu" in REGISTRY[n].lowerings]


def test_modules_come_in_the_order_of_their_names(tmp_path, monkeypatch):
    package = tmp_path / "registering"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "seen = []\nfrom mindspeed_fx.modules import import_all\nimport_all(__name__, without='late_')\n"
    )
    (package / "inner" / "__init__.py").write_text("raise AssertionError\n")
    for name in ("b", "a", "c", "late_d"):
        (package / f"{name}.py").write_text(f"from registering import seen\nseen.append({name!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    import registering

    try:
        assert registering.seen == ["a", "b", "c"]
        import_all("registering", prefix="late_")
        assert registering.seen == ["a", "b", "c", "late_d"]
    finally:
        for name in [m for m in sys.modules if m.split(".")[0] == "registering"]:
            del sys.modules[name]


def test_internals_of_torch_are_used_by_compat_alone():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.is_relative_to(ROOT / "compat"):
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "torch._" in text else ():
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [ast.unparse(node)]
                if isinstance(node, ast.Attribute)
                else []
            )
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno} {n}"
                for n in names
                if any(n == i or n.startswith(i + ".") for i in INTERNALS)
            ]
    assert not found, found
