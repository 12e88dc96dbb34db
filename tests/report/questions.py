"""docs/questions.md: ten questions, and the answers for two models. ``python -m tests.report.questions --write``

Both dumps are kept under ``--dir`` for looking at. A Llama of Hugging Face is compiled for this machine, and one by a
plan on four ranks is modelled for Ascend 910B2, rank by rank in this process.
"""

from __future__ import annotations

import argparse
import pathlib
import re

import mindspeed_fx
from mindspeed_fx.report.answers.ask import QUESTIONS, answer_text
from mindspeed_fx.report.answers.source import of_dump
from tests.report.question_models import MESH, PLAN, hf_llama, save_ranks

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "questions.md"
FORMS = ["level 1", "without norms", "batch 8"]
MODELS = {
    "llama": "LlamaForCausalLM of transformers, 3 layers, hidden 256, 2 x 256 tokens, on cpu without generated code",
    "ranks": f'a Llama of 1 layer by the plan "{PLAN}" on {" x ".join(f"{d} {n}" for d, n in MESH.items())} ranks, '
    "modelled for Ascend 910B2 (traced)",
}
ABOUT = {"rank": "3", "batch": "8"}
LINES = 16
"""Of an answer on the page."""

HEAD = """# Ten questions

`mindspeed-fx ask SCRIPT.py:FUNCTION QUESTION [ABOUT]` traces and models the step for the answer, without generating
code (but for `step1`, which compiles). `mindspeed-fx ask DIR QUESTION [ABOUT]` answers from a dump, which knows other
forms of the step if `mindspeed-fx explain SCRIPT.py:FUNCTION --save DIR --what-if` wrote it; `report.ask("peak")` is
the same of a report in Python. On the page (`report.html`) each is one click in the view "questions"; what the ranks do
differently is on the dump's `index.html`, one click further. The three give one answer (tests/report/test_answers.py).

| ask | question |
|---|---|
"""


def node_of(graphs) -> str:
    """A node that a fusion made."""
    for change in graphs[0].changes():
        if change.name.startswith("fusion.") and (match := re.search(r"^\+ {4}(\w+): ", change.diff, re.M)):
            return match[1]
    raise AssertionError("no fusion made a node")


def page(folder: pathlib.Path) -> str:
    """The text of the page, from the two dumps in ``folder``."""
    dumps = {name: of_dump(str(folder / name)) for name in MODELS}
    rows = [f"| `{q.name}{f' {q.argument}' if q.argument else ''}` | {q.title('')} |" for q in QUESTIONS]
    lines = [HEAD + "\n".join(rows), "", *(f"- **{name}**: {words}" for name, words in MODELS.items()), ""]
    lines.append(
        "Answers of both, made by `python -m tests.report.questions --write`; long ones are cut.\n"
        "The times of `step1` are those of the machine that made the page:"
    )
    for question in QUESTIONS:
        lines += ["", f"## {question.name}"]
        for name, graphs in dumps.items():
            about = node_of(graphs) if question.name == "node" else ABOUT.get(question.name, "")
            about = "" if question.name == "rank" and len(graphs[0].ranks()) == 1 else about
            text = answer_text(graphs, question.name, about).splitlines()
            cut = ["  ..."] if len(text) > LINES else []
            call = " ".join(filter(None, ("mindspeed-fx ask", name, question.name, about)))
            lines += ["", "```text", f"$ {call}", *text[:LINES], *cut, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/questions.md; else print it")
    parser.add_argument("--dir", default="build/questions", help="where the dumps are, or go (default: %(default)s)")
    parser.add_argument("--only", choices=tuple(MODELS), help="make the dump of one model alone")
    options = parser.parse_args()
    folder = pathlib.Path(options.dir)
    for name in [options.only] if options.only else MODELS:
        if (folder / name / "index.html").exists():
            continue
        if name == "llama":
            model, args, kwargs = hf_llama()
            mindspeed_fx.explain(model, *args, options={"codegen": "eager"}, what_if=FORMS, **kwargs).save(
                str(folder / name)
            )
        else:
            save_ranks(str(folder / name), layers=1, forms=FORMS)
    if not options.only:
        PAGE.write_text(page(folder)) if options.write else print(page(folder))


if __name__ == "__main__":
    main()
