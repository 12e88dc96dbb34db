"""What becomes of the flags of one run: every one is accounted for by a line, and those not done here are an error."""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Iterable

from mindspeed_fx.errors import OptionError, nearest
from mindspeed_fx.megatron.flags.conflicts import Conflict, conflicts_of
from mindspeed_fx.megatron.flags.flag import REFUSED, Flag, FlagError, NotDone, get
from mindspeed_fx.megatron.flags.llm_model import set_plain_rope
from mindspeed_fx.megatron.flags.router import drop_unread_bias
from mindspeed_fx.megatron.flags.table import BY_KEY, TABLE, parent_of, state_of
from mindspeed_fx.options import Options

SKIP_FLAG, SKIP_VARIABLE = "--mindspeed-skip-flags", "MINDSPEED_FX_SKIP_FLAGS"


@dataclass(frozen=True)
class Account:
    """What becomes of one flag of a run.

    Args:
        flag: as the user gave it.
        state: one of ``STATES``, "skipped", "Megatron's" or "unknown".
        text: what was done, or what to do instead.
        is_refused: whether the run cannot go on with it.
    """

    flag: str
    state: str
    text: str
    is_refused: bool = False

    def __str__(self) -> str:
        return f"{self.flag}: {self.text} [{self.state}]"


def words_of(argv: Iterable[str]) -> frozenset[str]:
    """The flags that an argument list names."""
    return frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))


def flags_to_skip(args: Namespace) -> dict[str, Flag]:
    """The flags that the user goes on without, by name.

    Raises:
        OptionError: a name is none of the table's, or a flag that changes values.
    """
    texts = [*(get(args, "mindspeed_skip_flags") or []), os.environ.get(SKIP_VARIABLE, "")]
    if isinstance(get(args, "mindspeed_skip_flags"), str):
        texts = [get(args, "mindspeed_skip_flags"), texts[-1]]
    names = [name.strip().lstrip("-") for text in texts for name in text.replace(",", " ").split()]
    skipped = {}
    for name in (f"--{name}" for name in names if name):
        flag = BY_KEY.get(name)
        if flag is None:
            valid = [f.key for f in TABLE if f.skip]
            raise OptionError(f"{SKIP_FLAG}: {name} is no flag of MindSpeed{nearest(name, valid)}")
        if not (flag.skip or (flag.of is not None and BY_KEY[flag.of].skip)):
            raise OptionError(f"{SKIP_FLAG}: {name} changes what is computed, so that it cannot be skipped; remove it")
        skipped[name] = flag
    return skipped


def account(args: Namespace, argv: Iterable[str] = ()) -> list[Account]:
    """What becomes of every flag that ``args`` ask for; sets Megatron's arguments on the way.

    Args:
        args: parsed, before Megatron validates them.
        argv: the words that were parsed: a flag given with its default is accounted for too.

    Raises:
        OptionError: the flags to skip are none, or change values.
    """
    words, skipped = words_of(argv), flags_to_skip(args)
    accounts: list[Account] = []
    conflicts = conflicts_of(args, skipped)
    for flag in TABLE:
        if not flag.is_requested(args, words):
            continue
        if flag.key in skipped:
            accounts.append(_skip(flag, args))
        else:
            accounts.append(_account_for(flag, args, skipped))
    accounts += _consequences(args, accounts)
    return accounts + [_of_conflict(c) for c in conflicts if not _is_told(c, accounts)]


def _of_conflict(conflict: Conflict) -> Account:
    return Account(conflict.first, REFUSED, conflict.text, True)


def _is_told(conflict: Conflict, accounts: list[Account]) -> bool:
    """Whether what became of one of the two is an error that names the other."""
    pair = (conflict.first, conflict.second)
    return any(
        a.is_refused and a.flag == one and other in a.text for a in accounts for one, other in (pair, pair[::-1])
    )


def _skip(flag: Flag, args: Namespace) -> Account:
    setattr(args, flag.attribute, flag.default)
    return Account(flag.key, "skipped", f"the run goes on without it, as {SKIP_FLAG} says; the same values to rounding")


def _account_for(flag: Flag, args: Namespace, skipped: dict[str, Flag]) -> Account:
    parent, state = parent_of(flag), state_of(flag)
    if parent is not None:
        if parent.key in skipped:
            return Account(flag.key, "skipped", f"with {parent.key}")
        text = f"see {parent.key}" if parent.is_requested(args, frozenset()) else f"no effect without {parent.key}"
        return Account(flag.key, state, text)
    if flag.state == REFUSED and flag.value is None and not flag.differs(args):
        return Account(flag.key, state, "its default asks for nothing")
    try:
        return Account(flag.key, state, _act(flag, args))
    except NotDone as error:
        return Account(flag.key, REFUSED, f"{error}{_way_to_skip(flag)}", True)


def _way_to_skip(flag: Flag) -> str:
    return f"; or skip it by {SKIP_FLAG} {flag.name.lstrip('-')}: the same values to rounding" if flag.skip else ""


def _act(flag: Flag, args: Namespace) -> str:
    """Does what the flag asks; says what was done.

    Raises:
        NotDone: it is not done here.
    """
    if flag.state == REFUSED or flag.act is None:
        raise NotDone(f"{flag.asks}: not done here; {flag.answer}")
    if not get(args, "yaml_cfg"):
        return flag.act(args)
    before = dict(vars(args))
    try:
        text = flag.act(args)
    except (AttributeError, TypeError):  # a file of Megatron's nests its arguments
        raise NotDone("with --yaml-cfg what it sets is written into the file") from None
    changes = sorted(name for name, value in vars(args).items() if name not in before or before[name] is not value)
    changes = [name for name in changes if not name.startswith("mindspeed_")]
    if changes:
        raise NotDone(f"with --yaml-cfg write {', '.join(changes)} into the file")
    return text


def _consequences(args: Namespace, accounts: list[Account]) -> list[Account]:
    """What follows from the flags together, and what Megatron's own ask that is not done here."""
    lines = []
    if not any(BY_KEY[a.flag].llm for a in accounts):
        return lines
    if text := set_plain_rope(args):
        lines.append(Account("--multi-latent-attention", "megatron", text))
    if text := drop_unread_bias(args):
        lines.append(Account("--moe-router-enable-expert-bias", "megatron", text))
    return lines


def refuse_all(accounts: list[Account]) -> None:
    """Raises one error for all flags that are not done here, if any.

    Raises:
        FlagError: a line for each, with what to do instead.
    """
    refused = [a for a in accounts if a.is_refused]
    if refused:
        lines = "\n".join(f"  {a.flag}: {a.text}" for a in refused)
        count = len({a.flag for a in refused})
        one = "1 flag of this run is" if count == 1 else f"{count} flags of this run are"
        raise FlagError(f"{one} not done by mindspeed_fx:\n{lines}")


def apply(args: Namespace, argv: Iterable[str] | None = None) -> list[str]:
    """Does what the flags ask: Megatron's arguments are set in ``args``.

    Args:
        args: parsed by Megatron's parser, before ``validate_args``.
        argv: the words that were parsed; None: the process's own.

    Returns:
        One line for each flag, on what was done.

    Raises:
        FlagError: flags that are not done here, all of them, a line for each with what to do instead.
    """
    accounts = account(args, sys.argv[1:] if argv is None else argv)
    refuse_all(accounts)
    return [str(a) for a in accounts]


def start(args: Namespace) -> None:
    """Does to the process what the flags ask: environment variables, torch's switches."""
    for flag in TABLE:
        if flag.start is not None and flag.is_requested(args, frozenset()):
            flag.start(args)


def backend_options(args: Namespace) -> dict[str, Any]:
    """Options of ``torch.compile(backend="mindspeed")`` that the flags ask for, after :func:`apply`.

    Raises:
        OptionError: they contradict one another.
    """
    merged: dict[str, Any] = {}
    for flag in TABLE:
        if flag.options is None or not flag.is_requested(args, frozenset()):
            continue
        for name, value in flag.options(args).items():
            if name in ("enable", "disable"):
                merged[name] = list(dict.fromkeys([*merged.get(name, []), *value]))
            elif merged.setdefault(name, value) != value:
                raise FlagError(f'{flag.key} asks for option "{name}" {value!r}, other flags for {merged[name]!r}')
    Options.parse(merged, environ={})
    return merged


def as_dicts(accounts: list[Account]) -> list[dict[str, Any]]:
    """Plain values, ready for JSON."""
    return [dataclasses.asdict(a) for a in accounts]
