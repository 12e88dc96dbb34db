"""The floors of docs/design.md: what may import what, lazy imports and annotations included."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

import mindspeed_fx

ROOT = Path(mindspeed_fx.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "design.md").read_text()


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(p): p for p in ROOT.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mindspeed_fx"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in FILES}
    return found


@functools.cache  # 800 files are read where a test asks, not where tests are collected
def import_graph() -> dict[str, set[str]]:
    """File -> what it imports, itself aside."""
    return {name: imports_of(path) - {name} for name, path in FILES.items()}


def folder_of(name: str) -> str:
    """The folder, or the file, directly under the package."""
    return name.split(".")[1] if "." in name else ""


def no_circle(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_circle_between_files():
    no_circle(import_graph())


def test_no_circle_between_folders():
    folders: dict[str, set[str]] = {}
    for name, targets in import_graph().items():
        if folder_of(name):
            folders.setdefault(folder_of(name), set()).update({folder_of(t) for t in targets} - {folder_of(name), ""})
    no_circle(folders)


def floors() -> list[set[str]]:
    """The floors as docs/design.md draws them, from the top down."""
    table = PAGE.split("<!-- floors -->")[1].split("<!-- /floors -->")[0]
    return [
        set(re.findall(r"`([\w/.]+?)(?:/|\.py)?`", line.split("|")[2]))
        for line in table.splitlines()
        if line.startswith("| ") and "`" in line
    ]


def test_the_floors_of_the_page_hold():
    """What stands on a floor imports from floors below it, or from its own."""
    rows = floors()
    height = {name: len(rows) - i for i, row in enumerate(rows) for name in row}
    there = {folder_of(name) for name in FILES} - {"", "_version"}
    assert there == set(height), "docs/design.md draws every folder and file under the package once"
    wrong = {
        (a, b)
        for a, targets in import_graph().items()
        for b in targets
        if folder_of(a) and folder_of(b) in height and height[folder_of(b)] > height[folder_of(a)]
    }
    assert not wrong, wrong


LOWEST = ("compat", "errors", "private_files")
"""What needs nothing else of the package."""

FORBIDDEN = [
    ("mindspeed_fx.passes.", ("mindspeed_fx.backend", "mindspeed_fx.planning")),
    ("mindspeed_fx.sharding.", ("mindspeed_fx.backend", "mindspeed_fx.planning", "mindspeed_fx.passes.sharding")),
    ("mindspeed_fx.compat.", tuple(f"mindspeed_fx.{f}" for f in {folder_of(n) for n in FILES} - {"", *LOWEST})),
    ("mindspeed_fx.graph.", ("mindspeed_fx.passes", "mindspeed_fx.kernels", "mindspeed_fx.capture")),
]


@pytest.mark.parametrize("above, below", FORBIDDEN)
def test_what_stands_below_knows_nothing_of_what_stands_above(above, below):
    assert not [
        (a, b) for a, targets in import_graph().items() if a.startswith(above) for b in targets if b.startswith(below)
    ]


def test_readers_import_no_pass():
    """passes/fusion/analysis reads graphs; it knows neither passes nor emitters, and of passes/base only the
    records.
    """
    passes = {name for name, path in FILES.items() if "\n@register(" in path.read_text()}
    readers = {
        name: targets
        for name, targets in import_graph().items()
        if name.startswith("mindspeed_fx.passes.fusion.analysis.")
    }
    assert len(readers) > 10
    assert not {(a, b) for a, targets in readers.items() for b in targets if b in passes or ".emit" in b}


WRITES = (
    r"import .*rewrite|rewrite\.|\bbuild\(|erase_node|replace_all_uses_with|replace_input_with|call_function\("
    r"|inserting_|\.meta\[.*\] = "
)


def test_readers_do_not_write():
    """passes/fusion/analysis edits no graph: a call that it needs is a NewCall, which an emitter builds; that no graph
    changes under them is looked at in tests/passes/fusion and tests/zoo (``readers_do_not_write``)."""
    folder = ROOT / "passes" / "fusion" / "analysis"
    assert not {p.stem: m.group() for p in folder.glob("*.py") if (m := re.search(WRITES, p.read_text()))}


def test_files_and_functions_can_be_read_in_one_sitting():
    """No file of more than 400 lines, no function of more than 80."""
    long = [(len(p.read_text().splitlines()), p.name) for p in FILES.values()]
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path.name}: {node.name}")
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert not [(n, name) for n, name in long if n > 400] + [(n, name) for n, name in functions if n > 80]


def test_pages_name_files_that_exist():
    """Every `file.py` of the pages is one of the package, the tests, the benchmarks or the examples."""
    top = ROOT.parent
    folders = ("mindspeed_fx", "tests", "benchmarks", "examples")
    paths = [p.relative_to(top).as_posix() for folder in folders for p in (top / folder).rglob("*.py")]
    gone = [
        (page.name, name)
        for page in [*(top / "docs").rglob("*.md"), top / "README.md"]
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text())
        if not any(f"/{path}".endswith(f"/{name}") for path in paths) and not re.search(r"[A-Z]{2}|family/", name)
    ]
    assert not gone


def test_a_pass_stands_alone_in_its_file_under_its_name():
    """`family.name` is passes/family/name.py."""
    for path in (ROOT / "passes").rglob("*.py"):
        text = path.read_text()
        names = re.findall(r'^NAME(?:, \w+)* = "([\w.]+)"', text, re.MULTILINE)
        if "\n@register(" in text:
            assert text.count("\n@register(") == 1 and names == [
                ".".join(path.relative_to(ROOT / "passes").with_suffix("").parts)
            ], path


def test_kernels_have_the_names_of_their_operators():
    """kernels/TARGET/OP.py serves kernels/OP.py; what does not is listed with its reason."""
    helpers = {
        "cpu": {
            "attention_blocked",
            "attention_flash",
            "gemm",
            "narrow_product",
            "products",
            "weight_gradient",
        },  # kernels that an operator chooses from
        "npu": {"schemas"},  # of torch_npu
        "triton": {
            *("launch", "tiles", "generate", "npu"),  # starting kernels
            "column_sums",  # the last step of gradients of weights
            "moe_unpermute",  # half of moe_permute
            *(
                "rms_norm_weight_gradient",
                "layer_norm_parameter_gradients",
                "layer_norm_backward_parts",
            ),  # of wide rows
            *("gated_delta_rule_backward", "kimi_delta_attention_backward"),  # gradients of those operators
            *("selective_scan_backward", "ssd_backward"),
            *("selective_scan_segments", "selective_scan_segment_gradients"),  # of parts of a sequence, side by side
        },
    }
    operators = {p.stem for p in (ROOT / "kernels").glob("*.py")}
    for target, others in helpers.items():
        files = {p.stem for p in (ROOT / "kernels" / target).glob("*.py")} - {"__init__"}
        assert files - others <= operators, (target, files - others - operators)
