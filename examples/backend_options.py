"""Every option of the backend as a command-line argument: read off its ``Options``, so that none can be missing."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options


def add_arguments(group: Any) -> None:
    """One argument for each field of ``Options``; what is not given is None."""
    for field in dataclasses.fields(Options):
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        kind = str(field.type)
        if kind.startswith("tuple"):
            how: dict[str, Any] = {"nargs": "*", "metavar": "PASS"}
        elif kind == "bool":
            how = {"action": argparse.BooleanOptionalAction}
        elif kind in ("str", "str | None"):
            how = {"metavar": field.name.upper()}
        else:
            how = {"type": _value, "metavar": "JSON" if kind.startswith("Mapping") else field.name.upper()}
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            default=None,
            help=f"default {default!r}; see docs/options.md",
            **how,
        )


def given(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """The options that were given, checked.

    Raises:
        SystemExit: the backend has no options, or one of them is bad; one line that names the option.
    """
    options = {f.name: getattr(args, f.name) for f in dataclasses.fields(Options) if getattr(args, f.name) is not None}
    if options and backend != "mindspeed":
        raise SystemExit(
            f"--{next(iter(options)).replace('_', '-')} is an option of --backend mindspeed, not of --backend {backend}"
        )
    if backend == "mindspeed":
        try:
            Options.parse(options)
        except OptionError as e:
            raise SystemExit(f"error: {e}") from None
    return options


def _value(text: str) -> Any:
    """A number or a JSON object where the text is one, else the text; ``Options`` says what is wrong with it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
