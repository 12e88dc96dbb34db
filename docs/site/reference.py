"""The generated pages of the reference: names of the package from their docstrings, options, passes, the command."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # mkdocs is started as a program of its own
    sys.path.insert(0, str(ROOT))

import mindspeed_fx
from mindspeed_fx import cli, passes
from mindspeed_fx.kernels import base as kernels
from mindspeed_fx.options import Options
from mindspeed_fx.passes import manager
from mindspeed_fx.planning.explain import Report
from mindspeed_fx.planning.search.searched_plan import SearchedPlan
from mindspeed_fx.planning.simulate import Simulation

RETURNED = (Report, SearchedPlan, Simulation)
"""What public functions return, with the methods that their docstrings name."""

EXTENDING = (passes.register, passes.PassReport, passes.calls, passes.site, passes.skip, kernels.operator)
"""What a pass or an operator of the user's is made of."""

SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Yields")


def python() -> str:
    """Every public name, with its signature and docstring."""
    names = [n for n in mindspeed_fx.__all__ if n not in ("__version__", "passes")]
    lines = ["# Python", "", "Generated from the docstrings.", "", "## mindspeed_fx", ""]
    for name in names:
        lines += _entry(f"mindspeed_fx.{name}", getattr(mindspeed_fx, name))
    lines += ["## What is returned", ""]
    for one in RETURNED:
        lines += _entry(one.__name__, one)
    lines += ["## Passes and operators of your own", "", "[Writing a pass](../passes.md).", ""]
    for one in EXTENDING:
        lines += _entry(f"{one.__module__}.{one.__name__}", one)
    return "\n".join(lines)


def options() -> str:
    """Every option as its docstring in `options.py` has it."""
    lines = ["## Every option, as the source has it", "", "Generated from `mindspeed_fx/options.py`.", ""]
    documented = option_texts()
    for field in dataclasses.fields(Options):
        missing = field.default is dataclasses.MISSING
        default = {} if missing else list(field.default) if isinstance(field.default, tuple) else field.default
        lines += [f"### {field.name}", "", f"`{field.name}: {field.type} = {default!r}`", ""]
        lines += [_roles(documented[field.name]), ""]
    return "\n".join(lines)


def option_texts() -> dict[str, str]:
    """Option -> the string below it in the class."""
    body = ast.parse(inspect.getsource(Options)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def passes_page() -> str:
    """The list of passes, by stage, in the order in which they run."""
    stages = dict(re.findall(r"^\* ``(\w+)``: (.*)$", manager.__doc__ or "", re.MULTILINE))
    lines = [
        "# Passes",
        "",
        "Generated from the list that the compiler runs (`mindspeed_fx/passes/manager.py`), in that order; "
        "`mindspeed-fx passes` prints the same with your own. Level 3: on request only (option `enable`). "
        "Exact: outputs and gradients stay bitwise equal; close: equal within rounding (option `check` compares).",
    ]
    for stage in manager.STAGES:
        lines += ["", f"## {stage}", "", stages[stage].capitalize() + ".", ""]
        lines += ["| pass | level | values | why here |", "|---|---|---|---|"]
        for row in manager.PASSES:
            if row.stage == stage:
                lines.append(f"| `{row.name}` | {row.level} | {'exact' if row.exact else 'close'} | {row.why} |")
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Every command of `mindspeed-fx`, with its arguments."""
    lines = [
        "# Command line",
        "",
        "Generated from the parser of `mindspeed-fx`. The status is 0 where all is well, 1 where the answer is bad "
        "news and 2 for a wrong call, which is one line on stderr.",
        "",
    ]
    for name, help_text, parser in commands():
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        lines += [f"## mindspeed-fx {name}", "", _sentence(help_text), "", f"`{usage}`", ""]
        rows = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
        if rows:
            lines += ["| argument | meaning |", "|---|---|"]
        for action in rows:
            words = ", ".join(f"`{_spelled(action, o)}`" for o in action.option_strings) or f"`{_value(action)}`"
            text = parser._get_formatter()._expand_help(action) if action.help else ""
            lines.append(f"| {words} | {_sentence(text).replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def commands() -> list[tuple[str, str, argparse.ArgumentParser]]:
    """Name, help and parser of every command."""
    subparsers = next(a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return [(name, helps[name], parser) for name, parser in subparsers.choices.items()]


PAGES = {"python": python, "passes": passes_page, "command_line": command_line}
"""Page under reference/ -> what makes its text."""


def _value(action: argparse.Action) -> str:
    if action.choices:
        return "{" + ", ".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest)


def _spelled(action: argparse.Action, option: str) -> str:
    return option if action.nargs == 0 else f"{option} {action.metavar or (_value(action)).upper()}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") or not text else ".")


def _entry(name: str, one: Any) -> list[str]:
    """A class or function: heading, signature, docstring, and public methods and properties with docstrings; of a
    module its public functions."""
    if inspect.ismodule(one):
        lines = [f"### {name.rpartition('.')[2]}", "", _markdown(inspect.getdoc(one) or ""), ""]
        for member, value in vars(one).items():
            if inspect.isfunction(value) and value.__module__ == one.__name__ and not member.startswith("_"):
                lines += [f"**`{member}{_flat(value)}`**", "", _markdown(inspect.getdoc(value) or ""), ""]
        return lines
    lines = [f"### {name.rpartition('.')[2]}", "", "```python", f"{name}{_signature(one)}", "```", ""]
    lines += [_markdown(inspect.getdoc(one) or ""), ""]
    members = vars(one).items() if inspect.isclass(one) else ()
    for member, value in members:
        target = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(target) or not target.__doc__:
            continue
        shown = member if isinstance(value, property) else f"{member}{_flat(target)}"
        lines += [f"**`{shown}`**", "", _markdown(inspect.getdoc(target) or ""), ""]
    return lines


def _signature(one: Any) -> str:
    """The signature, annotations as they are written, an argument a line where it is long."""
    signature = inspect.signature(one)
    drawn = [_parameter(p) for name, p in signature.parameters.items() if name not in ("self", "cls")]
    marks, kinds = [], [p.kind for n, p in signature.parameters.items() if n not in ("self", "cls")]
    for text, kind in zip(drawn, kinds):
        if kind is inspect.Parameter.KEYWORD_ONLY and "*" not in marks and not any(m.startswith("*") for m in marks):
            marks.append("*")
        marks.append(text)
    flat = "(" + ", ".join(marks) + ")"
    return flat if len(flat) < 70 else "(\n    " + ",\n    ".join(marks) + ",\n)"


def _flat(one: Any) -> str:
    """The signature in one line."""
    return re.sub(r"\n *", " ", _signature(one)).replace("( ", "(").replace(", )", ")")


def _parameter(parameter: inspect.Parameter) -> str:
    """As in the source: annotations are strings there, and default factories make empty mappings."""
    text = str(parameter).replace("<factory>", "{}")
    return re.sub(r"[\"']", "", text) if parameter.default in (None, parameter.empty) else text.replace("'", '"')


def _roles(text: str) -> str:
    """Sphinx's roles and literals as Markdown's code."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def _markdown(text: str) -> str:
    """A docstring of Google's style: sections become lists, indented text code."""
    out: list[str] = []
    section, item = "", re.compile(r"    ([\w*][\w, *]*): (.*)")
    for line in _roles(text).splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            section = line.rstrip(":")
            out += ["", f"**{section}**", ""]
        elif section and (match := item.fullmatch(line)):
            out.append(f"- `{match[1]}`: {match[2]}")
        elif section and line.startswith("    "):
            out.append(("  " if out[-1] else "") + line.strip())
        elif line and not line.startswith(" "):
            section = ""
            out.append(line)
        else:
            out.append(line)
    return "\n".join(out).strip()
