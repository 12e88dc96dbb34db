"""Names of today: words that the field has another name for are gone from the package (docs/design.md, "Words")."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mindspeed_fx

ROOT = Path(mindspeed_fx.__file__).parent

GONE = {
    "Way": "Strategy",
    "ways": "strategies",
    "_ways": "_sharding_rule",
    "travels": "uses_all_to_all",
    "Traffic": "ExpectedCollectives",
    "Spread": "RootMoment",
    "Tape": "Dataflow",
    "rivals": "alternatives",
    "frugal": "min_memory_order",
    "tidy": "cleanup",
    "because": "note_reason",
    "uncollected": "no_gc",
    "recompiled_once": "defer_recompile",
    "likelihood": "nll",
    "hidden_rows": "fully_masked_rows",
    "self_gated": "activations",
    "listing": "list_scheduler",
    "improve": "local_search",
    "sends": "expected, or messages",
    "backwards": "replicated_backward",
    "compared": "alternatives",
    "drawn": "plan_svg",
    "trials": "chunk_search",
    "tails": "alap_lengths",
    "found": "match, or the noun itself",
    "made": "new, or the noun itself",
    "given": "arg, args",
    "there": "the noun itself",
    "beside": "the noun itself",
}
"""Name of before -> the field's."""


def names(path: Path) -> list[tuple[int, str]]:
    """(line, name) of everything that a file defines or binds."""
    bound = [(0, path.stem)]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            bound.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.append((node.lineno, node.attr))
    return bound


@pytest.mark.parametrize("folder", sorted({p.parent.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py")}))
def test_words_of_before_are_gone(folder):
    remaining = [
        f"{path.name}:{line}: {name} (say {GONE[name]})"
        for path in (ROOT / folder).glob("*.py")
        for line, name in names(path)
        if name in GONE
    ]
    assert not remaining, remaining
