"""The ten questions, by name, and the answer to one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.report.answers import forms, ranks, rewrites, step
from mindspeed_fx.report.answers.base import Answer, Facts, text


@dataclass(frozen=True)
class Question:
    """One question that a user has."""

    name: str
    words: str
    argument: str
    """What it takes, as in "KIND"; "" for nothing."""
    default: str
    """What stands for the argument where none is given."""
    answer: Callable[[Facts, str], Answer]
    view: str
    """The view of the page that has more."""

    def title(self, argument: str) -> str:
        return self.words.format(argument or self.default or self.argument)


QUESTIONS = (
    Question("unfused", "Which layers lost their {} fusion, and why?", "KIND", "attention", rewrites.unfused, "passes"),
    Question("peak", "What is alive at the peak?", "", "", step.peak, "memory"),
    Question("exposed", "Which collective is exposed?", "", "", step.exposed, "timeline"),
    Question("rank", "What does rank {} do differently?", "N", "", ranks.rank, "ranks"),
    Question("node", "Which pass changed the node {}?", "NAME", "", rewrites.node, "passes"),
    Question("level", "What would level {} cost?", "N", "1", forms.level, "numbers"),
    Question("bought", "What did the fusion of {} buy?", "FAMILY", "norms", forms.bought, "measured"),
    Question("step1", "Why is step 1 slow?", "", "", step.step1, "numbers"),
    Question("batch", "Will batch {} fit?", "N", "8", forms.batch, "memory"),
    Question("approximated", "Is anything approximated?", "", "", rewrites.approximated, "passes"),
)
BY_NAME = {question.name: question for question in QUESTIONS}


def find_question(name: str) -> Question:
    """The question of that name.

    Raises:
        OptionError: there is none; the message has the nearest and all.
    """
    if name not in BY_NAME:
        raise OptionError(f"no question {name!r}{nearest(name, BY_NAME)}; valid: {', '.join(BY_NAME)}")
    return BY_NAME[name]


def ask(facts: Facts, name: str, argument: str | None = None) -> Answer:
    """The answer to a question about one graph.

    Raises:
        OptionError: no such question, or an argument that it does not take.
    """
    question = find_question(name)
    if argument and not question.argument:
        raise OptionError(f"{name}: {argument!r}; nothing is expected behind it")
    return question.answer(facts, str(argument) if argument else question.default)


def answer_text(graphs: Sequence[Facts], name: str, argument: str | None = None) -> str:
    """The answer of every graph, for a terminal."""
    question = find_question(name)
    title, parts = question.title(argument or ""), []
    for facts in graphs if name != "rank" else graphs[:1]:
        where = f" (graph {facts.values['index']})" if len(graphs) > 1 and name != "rank" else ""
        parts.append(text(title + where, ask(facts, name, argument)))
    return "\n".join(parts)


def list_text() -> str:
    """All questions, one a line."""
    rows = [(f"{q.name} [{q.argument}]" if q.argument else q.name, q.title("")) for q in QUESTIONS]
    width = max(len(call) for call, _ in rows)
    return "\n".join(f"  {call:<{width}}  {words}" for call, words in rows)
