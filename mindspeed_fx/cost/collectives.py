"""Time of a collective on a device's network: latency (alpha) and bytes over bandwidth (beta), tier by tier.

``bytes`` is always the larger of one rank's input and output: the gathered result of all_gather, the input of
reduce_scatter, the tensor of all_reduce and broadcast, one rank's whole buffer (its own share included) of all_to_all,
the message of send_recv.

On one tier of p ranks, with n bytes (Thakur, Rabenseifner, Gropp 2005; b the rate one way, a the latency of a message):

    switch   one port of b per rank: all_gather and reduce_scatter a log2(p) + n (p-1)/p / b, all_to_all a (p-1) + n
             (p-1)/p / b, broadcast a log2(p) + n / b (a pipeline)
    mesh     one link of b per pair, all used at once: all_gather, reduce_scatter and all_to_all a + n/p / b,
             broadcast twice that (scatter, gather)

all_reduce is reduce_scatter and all_gather; send_recv a + n / b on either. So two cards of a mesh have one link between
them, eight have seven each; at a switch two ranks have the whole port. In a group over several tiers the outer ones
move shares alone: all_gather gathers there first, then inside; all_reduce scatters inside, reduces outside, gathers
inside. all_to_all uses the tiers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sympy

from mindspeed_fx.cost.device import Hardware, Tier
from mindspeed_fx.cost.hardware import hardware as device
from mindspeed_fx.cost.operators import largest
from mindspeed_fx.errors import OptionError, nearest

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
TOPOLOGIES = ("mesh", "switch")


def collective_seconds(
    kind: str, bytes: Any, ranks: int, hardware: "str | Hardware", ranks_per_node: int | None = None
) -> Any:
    """Modelled seconds of one collective, launch included, with no other traffic on the links.

    Args:
        kind: one of :data:`KINDS`.
        bytes: see the module; a number, or a sympy expression, then the result is one too.
        ranks: size of the group; 1 costs nothing.
        hardware: name or :class:`Hardware`.
        ranks_per_node: how many of the group's ranks are in one machine; None: as many as fit, neighbours first. 1 for
            a group that has one rank in each machine, such as data parallel around tensor parallel.

    Raises:
        OptionError: unknown kind or hardware; ``ranks_per_node`` does not divide ``ranks`` or exceeds the machine.
    """
    return collective(kind, bytes, ranks, hardware, ranks_per_node).seconds


@dataclass(frozen=True)
class Collective:
    """Modelled time of a collective in its parts, in seconds; alpha and beta are sympy expressions where ``bytes`` was
    one.
    """

    launch: float
    alpha: Any
    """Latency of its messages: independent of size."""
    beta: Any
    """Bytes over bandwidth."""
    tier: str
    """The outermost tier it crosses; "" for one rank."""

    @property
    def seconds(self) -> Any:
        return self.launch + self.alpha + self.beta


def collective(
    kind: str, bytes: Any, ranks: int, hardware: "str | Hardware", ranks_per_node: int | None = None
) -> Collective:
    """As :func:`collective_seconds`, taken apart."""
    hw = device(hardware)
    _check_kind(kind)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise OptionError(f"ranks is {ranks!r}; valid: a whole number from 1 on")
    groups = place_group(ranks, hw, ranks_per_node)
    if not groups:
        return Collective(0.0, 0.0, 0.0, "")
    if kind == "send_recv":
        groups = [(groups[-1][0], 2)]  # the two ends may be anywhere in the group: its outermost tier
    alphas, betas, inner = [], [], 1
    total = math.prod(p for _, p in groups)
    for tier, p in groups:
        if kind == "all_to_all":
            alpha, beta = on_tier(kind, bytes * inner * p / total, p, tier.topology, tier.latency * inner, tier.rate)
        else:
            alpha, beta = on_tier(kind, bytes / inner, p, tier.topology, tier.latency, tier.rate)
        alphas.append(alpha)
        betas.append(beta)
        inner *= p
    combine = (lambda times: largest(*times)) if kind == "all_to_all" else sum
    return Collective(float(hw.launch), combine(alphas), combine(betas), groups[-1][0].name)


def on_tier(kind: str, n: Any, p: Any, topology: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Latency and transfer time of one collective on one tier; plain numbers or sympy symbols alike.

    Args:
        n: bytes as the module defines them.
        p: ranks.
        topology: one of :data:`TOPOLOGIES`.
        a: seconds of a message.
        b: B/s one way, of a link or a port.
    """
    steps = sympy.ceiling(sympy.log(p, 2)) if isinstance(p, sympy.Basic) else (p - 1).bit_length()
    if kind == "send_recv":
        return a, n / b
    if kind == "all_reduce":
        alpha, beta = on_tier("all_gather", n, p, topology, a, b)
        return 2 * alpha, 2 * beta
    if topology == "mesh":
        return (2 * a, 2 * n / p / b) if kind == "broadcast" else (a, n / p / b)
    if kind == "broadcast":
        return a * steps, n / b
    return a * ((p - 1) if kind == "all_to_all" else steps), n * (p - 1) / p / b


def formula(kind: str, topology: str) -> sympy.Expr:
    """Seconds on one tier in the symbols n (bytes), p (ranks), a (latency) and b (bytes per second)."""
    _check_kind(kind)
    if topology not in TOPOLOGIES:
        raise OptionError(f"topology {topology!r}; valid: {', '.join(TOPOLOGIES)}")
    n, p, a, b = sympy.symbols("n p a b", positive=True)
    return sympy.Add(*on_tier(kind, n, p, topology, a, b))


def place_group(ranks: int, hw: Hardware, ranks_per_node: int | None = None) -> list[tuple[Tier, int]]:
    """The tiers a group spans, inside out, and into how many parts each cuts it. Where machines or packages are filled
    unequally the fullest one counts, so the product may exceed ``ranks``.

    Raises:
        OptionError: as :func:`collective_seconds`.
    """
    if ranks_per_node is None:
        inside, machines = min(ranks, hw.node), -(-ranks // hw.node)
    else:
        if ranks_per_node < 1 or ranks % ranks_per_node or ranks_per_node > hw.node:
            raise OptionError(
                f"ranks_per_node is {ranks_per_node!r}; valid for {ranks} ranks on {hw.name}: a divisor of {ranks} up "
                f"to {hw.node}"
            )
        inside, machines = ranks_per_node, ranks // ranks_per_node
    results, reached = [], 1
    for tier in hw.tiers:
        reaches = tier.ranks or max(ranks, hw.node) * hw.node
        within = min(inside, max(1, min(reaches, hw.node) // reached))
        across = min(machines, max(1, reaches // max(reached, hw.node)))
        inside, machines, reached = -(-inside // within), -(-machines // across), reaches
        if within * across > 1:
            results.append((tier, within * across))
    return results


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise OptionError(f"collective {kind!r}; valid: {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
