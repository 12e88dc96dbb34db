"""``mindspeed-fx ask``: one question about a dump, or about a model that is modelled for it; ``mindspeed-fx index``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
from typing import Any

from mindspeed_fx.arguments import check_call, json_object, parse_bytes
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.user_script import build_model, failures, split_source
from mindspeed_fx.report.answers.ask import QUESTIONS, answer_text, ask, find_question, list_text
from mindspeed_fx.report.answers.base import Facts
from mindspeed_fx.report.answers.forms import check
from mindspeed_fx.report.terminal import show

FORMS = {"level": "level", "bought": "without", "batch": "batch"}
"""Questions about the step in another form, and which."""


def add_ask(commands: Any) -> None:
    """The arguments of ``ask`` and ``index``."""
    command = commands.add_parser(
        "ask",
        help="one question about a model or a dump, answered: " + ", ".join(q.name for q in QUESTIONS),
        usage="mindspeed-fx ask SCRIPT.py:FUNCTION|DIR [QUESTION [ABOUT]] [--options JSON] [--memory SIZE] [--json]",
        description="The questions, and what each may be about:\n" + list_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "source",
        metavar="SCRIPT.py:FUNCTION|DIR",
        help="a function that returns (model, args) or (model, args, kwargs), whose step is traced and modelled; or a "
        "dump's directory",
    )
    command.add_argument("question", nargs="?", metavar="QUESTION", help="none: list them")
    command.add_argument("about", nargs="?", metavar="ABOUT", help="a kind of layer, a rank, a node, a level, a batch")
    command.add_argument("--options", default="{}", help="backend options as JSON, of SCRIPT.py:FUNCTION")
    command.add_argument("--memory", metavar="SIZE", help='of the device, for "batch": 24GiB')
    command.add_argument("--json", action="store_true", help="print the answer of every graph as JSON")
    command.set_defaults(run=_ask)
    index = commands.add_parser("index", help="write the index of a dump whose ranks wrote to different places again")
    index.add_argument("directory", metavar="DIR")
    index.set_defaults(run=_index)


def _ask(arg: argparse.Namespace) -> int:
    if arg.question is None:
        print(list_text())
        return 0
    question = find_question(arg.question)
    if arg.about and not question.argument:
        raise OptionError(f"{arg.question}: {arg.about!r}; nothing is expected behind it")
    memory = None if arg.memory is None else parse_bytes("memory", arg.memory)
    options = json_object("--options", arg.options)
    if not arg.source.endswith(".py") and ".py:" not in arg.source:
        if options:
            raise OptionError(f"--options is for SCRIPT.py:FUNCTION; {arg.source} is what another run wrote")
        from mindspeed_fx.report.answers.source import of_dump

        if not os.path.isdir(arg.source):
            raise OptionError(f"{arg.source!r} is neither SCRIPT.py:FUNCTION nor a directory")
        graphs = of_dump(arg.source, memory)
    else:
        graphs = _graphs_of_model(arg.source, arg.question, arg.about or question.default, options, memory)
    if not graphs:
        raise OptionError(f"{arg.source}: no graph was compiled, and there is nothing to ask about")
    if arg.json:
        answers = [ask(facts, arg.question, arg.about) for facts in graphs]
        print(json.dumps([dataclasses.asdict(a) for a in answers], indent=1))
    else:
        show(answer_text(graphs, arg.question, arg.about))
    return 0


def _graphs_of_model(
    source: str, question: str, about: str, options: dict[str, Any], memory: int | None
) -> list[Facts]:
    """The step compiled where its time is asked for, else modelled; and in another form, where one is asked for."""
    from mindspeed_fx.options import Options
    from mindspeed_fx.planning import what_if as modelling
    from mindspeed_fx.planning.explain import explain, run_step
    from mindspeed_fx.report.answers.source import of_records

    path, function = split_source(source)
    check(question, about)
    level = Options.parse(options).level
    model, args, kwargs = build_model(path, function)
    check_call("ask", args, kwargs)
    with failures(path):
        if question == "step1":
            return of_records(explain(model, *args, options=options, **kwargs).graphs, memory)
        graphs = modelling.model_step(model, args, kwargs, run_step, options)
        if question in FORMS and not (question == "level" and about == str(level)):
            wanted = [f"{FORMS[question]} {about}"]
            result = modelling.what_if(model, args, kwargs, run_step, options, wanted, graphs)
            for graph in graphs:
                graph.what_if = result
    return of_records(graphs, memory)


def _index(arg: argparse.Namespace) -> int:
    from mindspeed_fx.report.dump import write_index

    root = pathlib.Path(arg.directory)
    if not root.is_dir() or not list(root.glob("rank*/graph*/index.md")):
        raise OptionError(f"{arg.directory} is no dump: there is no rank*/graph*/index.md in it")
    folders = write_index(root)
    print(f"{root / 'index.html'}: {len(folders)} graphs of {len({f.parent for f in folders})} ranks")
    return 0
