"""What a plan needs to send, in words of its own: reports and checks read it without the sharding rules."""

from __future__ import annotations

from dataclasses import dataclass

NUMBER = 32
"""Bytes up to which a collective is one of a few numbers, such as a loss or a count of tokens, and is not judged."""


@dataclass(frozen=True)
class Send:
    """A collective that a plan needs."""

    kind: str
    """"all_reduce", "all_gather", "reduce_scatter" or "all_to_all"."""
    dim: str
    """Mesh dimension."""
    bytes: int
    """Of its input on one rank."""
    backward: bool
    module: str
    why: str


@dataclass(frozen=True)
class Whole:
    """An operator that is computed alike on every rank though what it reads arrives divided, and no edge of the plan
    asked for that.
    """

    operator: str
    dim: str
    module: str
    source: str
