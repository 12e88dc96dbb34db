"""Names of today: words that the field has another name for are gone from the package (docs/design.md, "Words")."""

from __future__ import annotations

import ast
import re
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


DIALECT = {
    r"(made|makes?|making) (\w+ )?again": "recompute",
    r"travels?|travelling": "sent by all-to-all",
    r"frugal|tidy|rivals?|beside|tapes?|lanes?|listing": "the field's word",
    r"ways?\b(?! (to|of|in|around|from))": "strategy",
    r"origin|likelihood": "gather layout, nll",
}
"""What no text says that a user reads -> what it says instead."""


def user_texts() -> list[tuple[str, str]]:
    """(where, text) of what users read: options, passes and the reasons of their order, the command line, the table of
    options.
    """
    from mindspeed_fx.passes import base, manager

    texts = [(row.name, row.why) for row in manager.PASSES]
    texts += [(p.name, p.description) for p in base.registered() if p.name in manager.ROWS]
    fields = next(
        n
        for n in ast.parse((ROOT / "options.py").read_text()).body
        if isinstance(n, ast.ClassDef) and n.name == "Options"
    ).body
    for field, doc in zip(fields, fields[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            texts.append((f"option {field.target.id}", doc.value.value))
    commands = ("cli.py", "planning/explain_command.py")
    for file, node in ((f, n) for f in commands for n in ast.walk(ast.parse((ROOT / f).read_text()))):
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("help", "description")
            and isinstance(node.value, ast.Constant)
        ):
            texts.append((f"{file}:{node.lineno}", node.value.value))
    page = ROOT.parent / "docs" / "options.md"
    return texts + [(page.name, line) for line in page.read_text().splitlines()]


def test_what_users_read_has_the_words_of_the_field():
    texts = user_texts()
    assert len(texts) > 150 and any(where == "option recompute" for where, _ in texts)
    wrong = [
        f"{where}: {m.group()} (say {word}): {text}"
        for where, text in texts
        for pattern, word in DIALECT.items()
        if (m := re.search(rf"\b({pattern})\b", text))
    ]
    assert not wrong, "\n".join(wrong)
