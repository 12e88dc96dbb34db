"""A fault: one expression or statement of one file, replaced by another. The rest of the file keeps its text."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Iterator

from tests.mutants.kinds import KINDS, Place

SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript, ast.List, ast.Tuple, ast.Dict, ast.Pass)
"""What needs no parentheses wherever it stands."""

TEXT = (ast.JoinedStr, ast.Raise)
"""Words for people: a fault there is none of the kinds."""


@dataclass(frozen=True)
class Fault:
    """``before`` at these places (columns in bytes, as ``ast`` counts them) becomes ``after``."""

    file: str
    function: str
    kind: str
    statement: int
    """First line of the statement that it is a part of."""
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str
    occurrence: int = 0
    """Which one it is of equal replacements in the same function."""

    @property
    def name(self) -> str:
        """The same one when lines above have moved."""
        nth = f" ({self.occurrence + 1})" if self.occurrence else ""
        return f"{self.kind} {self.file}::{self.function}: {self.before} -> {self.after}{nth}"


def plant(source: str, fault: Fault) -> str:
    """``source`` with the fault in it."""
    lines = source.encode().splitlines(keepends=True)
    first, last = lines[fault.line - 1], lines[fault.end_line - 1]
    head = b"".join(lines[: fault.line - 1]) + first[: fault.column]
    tail = last[fault.end_column :] + b"".join(lines[fault.end_line :])
    return (head + fault.after.encode() + tail).decode()


def is_another_program(source: str, fault: Fault) -> bool:
    """Whether the fault leaves valid Python that is not the same program."""
    try:
        return ast.dump(ast.parse(plant(source, fault))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def find_faults(file: str, source: str) -> list[Fault]:
    """Every fault of every kind that has a place in ``source``."""
    counts: dict[tuple[str, ...], int] = {}
    faults = []
    for kind, place, old, new in _candidates(file, ast.parse(source)):
        text = ast.unparse(new)
        fault = Fault(
            file,
            place.function,
            kind,
            place.statement,
            old.lineno,  # type: ignore[attr-defined]
            old.col_offset,  # type: ignore[attr-defined]
            old.end_lineno,  # type: ignore[attr-defined]
            old.end_col_offset,  # type: ignore[attr-defined]
            ast.unparse(old),
            text if isinstance(new, SIMPLE) else f"({text})",
        )
        key = (kind, fault.function, fault.before, fault.after)
        faults.append(replace(fault, occurrence=counts.get(key, 0)))
        counts[key] = counts.get(key, 0) + 1
    return faults


def _candidates(file: str, tree: ast.Module) -> Iterator[tuple[str, Place, ast.AST, ast.AST]]:
    """Kind, place, the node, and what replaces it; in the order of the text."""
    pending: list[tuple[ast.AST, Place]] = [(tree, Place(file, "", 0))]
    while pending:
        node, place = pending.pop()
        if isinstance(node, ast.stmt):
            place = replace(place, statement=node.lineno)
        for kind, find in KINDS.items():
            for old, new in find(node, place):
                yield kind, place, old, new
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            place = replace(place, function=f"{place.function}.{node.name}".strip("."))
        if not isinstance(node, TEXT) and not _is_typing(node):
            pending += [(n, place) for n in reversed(list(_children(node)))]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST))


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
