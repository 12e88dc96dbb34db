"""What a row of the table of flags is, and the few words that build one.

A flag of MindSpeed or MindSpeed-LLM is a :class:`Flag`: what it asks, what becomes of it here (``state``), and the
functions that do it. The tables are lists of rows in the files beside this one; ``table.py`` joins them.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Callable

from mindspeed_fx.errors import OptionError

OPTION, MEGATRON, COMPILER, REFUSED, OWN = "option", "megatron", "compiler", "refused", "own"

STATES = {
    OPTION: "a pass or an option of mindspeed_fx, or its adaptor, does it",
    MEGATRON: "Megatron's own arguments do it, and are set so",
    COMPILER: "nothing to do: the compiler or Megatron does it anyway, or speed alone is asked for; the row says why",
    REFUSED: "an error that names what to do instead",
    OWN: "MindSpeed-LLM's own work (its weights, its data), not done here: accepted, and said so",
}


class FlagError(OptionError):
    """Flags that are not done here: one line for each, with what to do instead."""


class NotDone(Exception):
    """Raised by ``act``: this value, or this combination, is not done here; the text says what to do instead."""


@dataclass(frozen=True)
class Flag:
    """One flag, or one value that MindSpeed adds to a flag of Megatron's.

    Args:
        name: as the user types it.
        state: one of ``STATES``.
        asks: what MindSpeed does with it.
        answer: what becomes of it here; for a refused flag what to do instead.
        action, type, default, choices, nargs, dest: for argparse.
        value: the value that MindSpeed adds to a flag of Megatron's; the row is about that value alone.
        of: the flag of which this one is a setting: it has no effect without that, and shares its fate.
        act: sets Megatron's arguments; returns what was done in a few words, or raises :class:`NotDone`.
        options: options of the backend that the flag asks for.
        start: what has to be done to the process (environment, torch), once, after the arguments are known.
        requested: whether the arguments ask for it, where that is more than "not the default".
        skip: whether a run without it computes the same values (memory or speed alone): it can be skipped.
        llm: whether the flag is MindSpeed-LLM's.
        shown_by: the test of values, in tests/megatron/flags/test_values.py or FILE::TEST, that shows the effect, if
            there is one.
    """

    name: str
    state: str
    asks: str
    answer: str
    action: str = "store"
    type: Callable | None = None
    default: Any = None
    choices: tuple | None = None
    nargs: str | None = None
    dest: str | None = None
    value: str | None = None
    of: str | None = None
    act: Callable[[Namespace], str] | None = None
    options: Callable[[Namespace], dict[str, Any]] | None = None
    start: Callable[[Namespace], None] | None = None
    requested: Callable[[Namespace], bool] | None = None
    skip: bool = False
    llm: bool = False
    shown_by: str | None = None

    @property
    def key(self) -> str:
        """The flag, or the flag with the value that the row is about."""
        return f"{self.name} {self.value}" if self.value is not None else self.name

    @property
    def attribute(self) -> str:
        """The name of its value in the parsed arguments."""
        return self.dest or self.name.lstrip("-").replace("-", "_")

    @property
    def test(self) -> str:
        """The test that shows the effect, as pytest names it."""
        if self.shown_by is not None:
            name = self.shown_by if "::" in self.shown_by else f"test_values.py::{self.shown_by}"
            return f"tests/megatron/flags/{name}"
        return f"tests/megatron/flags/test_effects.py::test_effect[{self.key}]"

    def is_requested(self, args: Namespace, words: frozenset[str]) -> bool:
        """Whether the arguments ask for it: named among ``words``, or another value than the default."""
        if self.requested is not None:
            return self.requested(args)
        held = getattr(args, self.attribute, self.default)
        if self.value is not None:
            return self.value in (held if isinstance(held, (list, tuple)) else [held])
        return self.differs(args) or self.name in words

    def differs(self, args: Namespace) -> bool:
        """Whether its value is another than the default."""
        return getattr(args, self.attribute, self.default) != self.default


def switch(name: str, state: str, asks: str, answer: str, **more: Any) -> Flag:
    """A flag without a value."""
    return Flag(name, state, asks, answer, action="store_true", default=False, **more)


def number(name: str, default: Any, state: str, asks: str, answer: str, **more: Any) -> Flag:
    """A flag with a whole number, or with a fraction where the default is one."""
    return Flag(name, state, asks, answer, type=float if isinstance(default, float) else int, default=default, **more)


def word(name: str, default: Any, state: str, asks: str, answer: str, **more: Any) -> Flag:
    """A flag with a word."""
    return Flag(name, state, asks, answer, type=str, default=default, **more)


def setting(name: str, of: str, default: Any = False, kind: Any = None, **more: Any) -> Flag:
    """A flag that tunes another: without it nothing, with it what becomes of that one.

    Args:
        default: False makes a switch; otherwise the type is that of the default, or ``kind``.
    """
    asks, answer = f"a setting of `{of}`", f"what becomes of `{of}`; without that flag it has no effect"
    if default is False and kind is None:
        return switch(name, REFUSED, asks, answer, of=of, **more)
    return Flag(name, REFUSED, asks, answer, type=kind or type(default), default=default, of=of, **more)


def added(name: str, value: str, state: str, asks: str, answer: str, **more: Any) -> Flag:
    """A value that MindSpeed adds to a flag of Megatron's."""
    return Flag(name, state, asks, answer, value=value, **more)


def refuse(text: str) -> Callable[[Namespace], str]:
    """An ``act`` that refuses."""

    def act(args: Namespace) -> str:
        raise NotDone(text)

    return act


def rename(flag: str, attribute: str) -> Callable[[Namespace], str]:
    """An ``act`` that hands the value on to Megatron's argument ``attribute``."""
    source = flag.lstrip("-").replace("-", "_")

    def act(args: Namespace) -> str:
        value = getattr(args, source)
        setattr(args, attribute, value)
        return f"{attribute} = {value}"

    return act


def enable(*passes: str) -> Callable[[Namespace], dict[str, Any]]:
    """``options`` that name passes to turn on."""
    return lambda args: {"enable": list(passes)}


def get(args: Namespace, attribute: str, default: Any = None) -> Any:
    """An argument, also where the parser does not have it; for a list of one word that word."""
    value = getattr(args, attribute, default)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def has_virtual_stages(args: Namespace) -> bool:
    """Whether a rank holds several stages of the pipeline."""
    return bool(
        get(args, "num_layers_per_virtual_pipeline_stage")
        or get(args, "num_virtual_stages_per_pipeline_rank")
        or get(args, "schedules_method")
        or get(args, "mindspeed_virtual_stages", 1) > 1  # of a layout that other flags have become
    )


def count_layers(args: Namespace) -> int:
    """The layers of the model.

    Raises:
        NotDone: they are not given.
    """
    layers = get(args, "num_layers")
    if not layers:
        raise NotDone("give --num-layers")
    return int(layers)
