"""MindSpeed's flags in Megatron's parser, and what becomes of the flags of a list of words before a run."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import types
from typing import Any, Iterable, Sequence

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.megatron import fp8_linears, missing, patches
from mindspeed_fx.megatron.flags.account import (
    SKIP_FLAG,
    SKIP_VARIABLE,
    Account,
    account,
    apply,
    start,
    words_of,
)
from mindspeed_fx.megatron.flags.config import with_config_fields
from mindspeed_fx.megatron.flags.flag import MEGATRON, Flag
from mindspeed_fx.megatron.flags.table import SUBJECTS, TABLE
from mindspeed_fx.megatron.flags.tools import PEAK_FLAG

ARGUMENTS = "megatron.training.arguments"
CONFIG = "core_transformer_config_from_args"
_state: dict[str, Any] = {}
"""The parser that was built last, and Megatron's functions while they are replaced."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags that ``parser`` lacks, and the values that MindSpeed adds to Megatron's flags.

    A flag that is defined again later (by a script's own ``extra_args_provider``) is the later one.
    """
    parser.conflict_handler = "resolve"
    for subject, flags in SUBJECTS.items():
        group = parser.add_argument_group(f"MindSpeed: {subject}")
        for flag in flags:
            if flag.value is not None:
                _extend(parser, flag)
            elif flag.name not in parser._option_string_actions:
                group.add_argument(flag.name, **_keywords(flag))
    if SKIP_FLAG not in parser._option_string_actions:
        own = parser.add_argument_group("mindspeed_fx")
        own.add_argument(PEAK_FLAG, type=float, help="TFLOP/s of one device, of which --op-cal-tflops gives shares")
        own.add_argument(
            SKIP_FLAG,
            nargs="+",
            default=[],
            metavar="NAME",
            help=f"flags of MindSpeed to go on without, where the values stay the same (also {SKIP_VARIABLE})",
        )
    return parser


def _keywords(flag: Flag) -> dict[str, Any]:
    """What argparse is told of a flag."""
    keywords: dict[str, Any] = {"action": flag.action, "default": flag.default, "dest": flag.attribute}
    if flag.action == "store":
        keywords.update(type=flag.type, choices=flag.choices, nargs=flag.nargs)
    return {**keywords, "help": flag.asks.replace("%", "%%")}


def _extend(parser: argparse.ArgumentParser, flag: Flag) -> None:
    """Adds the value to the choices of a flag that has some."""
    action = parser._option_string_actions.get(flag.name)
    if action is not None and action.choices is not None and flag.value not in action.choices:
        action.choices = [*action.choices, flag.value]


def load_arguments() -> types.ModuleType | None:
    """Megatron-LM's ``megatron.training.arguments``, or None where it is not installed."""
    take_back = missing.answer_for_triton()
    try:
        return importlib.import_module(ARGUMENTS)
    except ImportError:
        take_back()
        return None


def patch_parser() -> None:
    """Megatron's ``parse_args`` takes MindSpeed's flags and does what they ask, before ``validate_args``.

    Megatron-core's configuration gets the functions that flags ask for (``config.py``).

    Raises:
        ImportError: there is no Megatron-LM (``megatron.training``).
    """
    if _state.get("originals"):
        return
    arguments = importlib.import_module(ARGUMENTS)
    names = {"add_megatron_arguments": _wrap_add, "parse_args": _wrap_parse, CONFIG: _wrap_config}
    originals = {name: getattr(arguments, name) for name in names}
    wrapped = {name: wrap(originals[name]) for name, wrap in names.items()}
    _state["originals"] = [(originals[name], wrapped[name]) for name in names]
    patches.sweep({id(old): (old, new) for old, new in _state["originals"]})


def unpatch_parser() -> None:
    """Megatron's parser as it was."""
    pairs = _state.pop("originals", [])
    _state.pop("printed", None)
    patches.sweep({id(new): (new, old) for old, new in pairs})


def _wrap_add(original: Any) -> Any:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        _state["parser"] = add_arguments(original(parser))
        return _state["parser"]

    return add_megatron_arguments


def _wrap_parse(original: Any) -> Any:
    @functools.wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        parsed = original(*args, **kwargs)
        if getattr(parsed, "yaml_cfg", None):
            _merge_words(parsed, sys.argv[1:])
        _print_once(apply(parsed, sys.argv[1:]), getattr(parsed, "rank", 0))
        start(parsed)
        return parsed

    return parse_args


def _print_once(lines: list[str], rank: int) -> None:
    """One rank prints, and each line once: Megatron's scripts parse their arguments several times."""
    printed = _state.setdefault("printed", set())
    for line in lines:
        if rank == 0 and line not in printed:
            print(f"mindspeed_fx: {line}", flush=True)
            printed.add(line)


def _wrap_config(original: Any) -> Any:
    @functools.wraps(original)
    def core_transformer_config_from_args(args: argparse.Namespace, *more: Any, **named: Any) -> Any:
        with with_config_fields(args):
            return original(args, *more, **named)

    return core_transformer_config_from_args


def _merge_words(parsed: argparse.Namespace, argv: Sequence[str]) -> None:
    """MindSpeed's flags beside a file of arguments: the words that were given, else the file's, else the defaults."""
    words, (given_words, _) = words_of(argv), _state["parser"].parse_known_args(list(argv))
    sections = [x for x in vars(parsed).values() if isinstance(x, types.SimpleNamespace)]
    for flag in TABLE:
        # Megatron refuses a name that stands both in a section and outside
        owner = next((x for x in sections if hasattr(x, flag.attribute)), parsed)
        if flag.value is None and (flag.name in words or not hasattr(owner, flag.attribute)):
            setattr(owner, flag.attribute, getattr(given_words, flag.attribute))
    parsed.mindspeed_skip_flags = given_words.mindspeed_skip_flags
    parsed.mindspeed_peak_tflops = given_words.mindspeed_peak_tflops


def explain(argv: Sequence[str]) -> list[Account]:
    """What becomes of each flag of a list of words, before a run; nothing is started.

    Megatron's own flags are known where Megatron-LM is installed; without it they are taken as they stand.

    Raises:
        OptionError: a word that no parser takes, such as a value that is no number.
    """
    if isinstance(argv, str) or not all(isinstance(word, str) for word in argv):
        raise OptionError(f"the arguments are {argv!r}; a list of words is expected, as in ['--num-layers', '32']")
    if argv and not argv[0].startswith("-"):
        raise OptionError(
            f"the arguments begin with {argv[0]!r}, which is no flag; those behind the script's name are expected, as "
            "in --num-layers 32"
        )
    arguments = load_arguments()
    parser = _Parser(allow_abbrev=False, add_help=False)
    if arguments is not None:
        arguments.add_megatron_arguments(parser)
    own = set(parser._option_string_actions)
    add_arguments(parser)
    args, rest = parser.parse_known_args(list(argv))
    if arguments is None:
        _guess(args, rest)
    accounts = account(args, argv)
    known = {a.flag.partition(" ")[0] for a in accounts} | {SKIP_FLAG, PEAK_FLAG}
    for name in dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--")):
        if name not in known:
            accounts.append(_account_for_other(name, own, parser, arguments is not None))
    return _with_refusals(accounts, args)


def _with_refusals(accounts: list[Account], args: argparse.Namespace) -> list[Account]:
    """The accounts, those of flags of Megatron's that are refused where it checks its arguments among them."""
    try:
        fp8_linears.refuse(args)
    except ValueError as error:
        name, _, text = str(error).partition(" ")
        return [a for a in accounts if a.flag != name] + [Account(name, "refused", text, True)]
    return accounts


def _account_for_other(name: str, own: set[str], parser: argparse.ArgumentParser, certain: bool) -> Account:
    """A flag that is none of MindSpeed's."""
    rows = (flag for flag in TABLE if flag.name == name and flag.state == MEGATRON)
    done = next((flag.answer for flag in rows), "Megatron's own flag")
    if name in own or name in {flag.name for flag in TABLE}:
        return Account(name, "Megatron's", done)
    if not certain:
        return Account(name, "Megatron's", "Megatron's own flag, if Megatron-LM has it: it is not installed here")
    close = nearest(name, list(parser._option_string_actions))
    return Account(name, "unknown", f"neither Megatron's nor MindSpeed's{close}; the script's own, or a slip", True)


def _guess(args: argparse.Namespace, words: Iterable[str]) -> None:
    """Megatron's flags without its parser: numbers where words are numbers, True without a word."""
    name, values = None, []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(_number(word))
            continue
        if name is not None and not hasattr(args, name):
            value = values[0] if len(values) == 1 else values
            setattr(args, name, value if values else True)
        flag, _, text = word.partition("=")
        name, values = flag.lstrip("-").replace("-", "_"), [_number(text)] if text else []


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> Any:
        raise OptionError(message)
