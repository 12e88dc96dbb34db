"""Seconds of a step: kernels by the cost model, messages by its collectives, stages one after the other.

A microbatch costs a stage t_f + t_b. The step of a pipeline of p stages and m microbatches (1F1B, Narayanan et al.
2019) takes the fullest stage m times and the way of one microbatch through the others once, divided by the virtual
stages v (Narayanan et al. 2021, interleaved 1F1B):

    step = m max_i t_i + (sum_i t_i - max_i t_i) / v + messages between stages + gradients + optimizer + the step's own

A message that kernels hide costs what they are too short for, and a share of itself: it takes memory and cores from
them. Where the host launches kernels more slowly than the device runs them, the host's time counts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from mindspeed_fx.cost.collectives import collective
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.operators import Cost
from mindspeed_fx.cost.training import TrainingConstants
from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.layer_work import Kernel, LayerWork, Message, Work
from mindspeed_fx.planning.predict.settings import Settings
from mindspeed_fx.planning.predict.stages import layout
from mindspeed_fx.planning.predict.step_work import StepWork, stage_layers


@dataclass
class Timing:
    """Seconds of one step and of its parts on the fullest rank."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


def times_from(run: Settings, work: StepWork, hw: Hardware, constants: TrainingConstants) -> dict[str, str]:
    """Part of the step -> what :meth:`Clock.times_from` says of it."""
    layers = (work.dense, work.moe, work.head)
    return Clock(hw, constants, run).times_from(w for layer in layers for w in (layer.forward, layer.backward))


def ranks_per_node(run: Settings, group: str, node: int) -> tuple[int, int]:
    """Size of a group, and how many of its ranks are in one machine: tp is inside, then cp, dp, and pp outside."""
    etp = run.expert_tp
    inner = {
        "tp": (run.tp, 1),
        "cp": (run.cp, run.tp),
        "dp": (run.copies, run.tp),
        "ep": (run.ep, etp),
        "expert_dp": (max(1, run.copies * run.tp // (run.ep * etp)), etp * run.ep),
        "pp": (run.pp, run.tp * run.copies),
    }
    ranks, stride = inner[group]
    near = max(1, min(ranks, node // stride if stride < node else 1))
    while ranks % near:
        near -= 1
    return ranks, near


class Clock:
    """Seconds of work on one device for one run."""

    def __init__(self, hw: Hardware, constants: TrainingConstants, run: Settings):
        self.hw, self.constants, self.run = hw, constants, run
        sorting = float(constants.permutation)
        self.slower = {"expert products": constants.imbalance, "permutation": sorting, "router": sorting}
        self.devices: dict[str, Hardware] = {}
        """Part -> the device, where it is not as it is."""
        if run.attention_kernel == "early" and "attention" in run.fused:
            self.slower["attention"] = constants.early_attention
            self.devices["attention"] = dataclasses.replace(hw, measured=())  # of the current kernel
        self.line = functools.cache(self._line)

    def _line(self, kind: str, group: str) -> tuple[float, float]:
        """Seconds of a collective as (fixed, per byte)."""
        ranks, near = ranks_per_node(self.run, group, self.hw.node)
        if ranks == 1:
            return 0.0, 0.0
        result = collective(kind, 2**30, ranks, self.hw, near)
        return float(result.launch + result.alpha), float(result.beta) / 2**30

    def message(self, message: Message) -> float:
        fixed, each = self.line(message.kind, message.group)
        seconds = fixed + each * message.nbytes
        return seconds * self.constants.imbalance if message.group == "ep" else seconds

    def _cached(self, kernel: Kernel) -> Cost:
        """The cost of ``kernel`` with what of its chain stays in the last-level cache."""
        hw = self.hw
        if not kernel.chained or not hw.cache or not hw.cache_bandwidth or kernel.alive > hw.cache:
            return kernel.cost
        return dataclasses.replace(kernel.cost, cached=kernel.chained)

    def times_from(self, works: Iterable[Work]) -> dict[str, str]:
        """Part -> what its products' or attention's time is taken from: measured rows or "formula", of several the two
        that most of it is."""
        rows: dict[str, Counter] = defaultdict(Counter)
        for kernel in (k for work in works for k in work.kernels if k.cost.kind):
            device = self.devices.get(kernel.part, self.hw)
            text = str(kernel.cost.correction(device) or "formula")
            rows[kernel.part][text] += float(kernel.cost.seconds(device)) * kernel.times
        result = {}
        for part, texts in rows.items():
            most = [(text, seconds / texts.total()) for text, seconds in texts.most_common(2)]
            shares = (f"{100 * share:.0f} % of it: {text}" for text, share in most)
            result[part] = "; ".join(shares) if len(most) > 1 else most[0][0]
        return result

    def work(self, work: Work) -> dict[str, float]:
        """Part -> seconds of one pass, with what the host adds as "host"."""
        parts: dict[str, float] = defaultdict(float)
        for kernel in work.kernels:
            device = self.devices.get(kernel.part, self.hw)
            seconds = float(self._cached(kernel).seconds(device)) * kernel.times
            parts[kernel.part] += seconds * self.slower.get(kernel.part, 1.0)
        busy, hidden = sum(parts.values()), 0.0
        for message in work.messages:
            seconds = self.message(message)
            hidden += seconds * message.hidden
            parts[message.part] += seconds * (1 - message.hidden + message.hidden * self.constants.contention)
        if hidden > busy:
            parts["exposed"] += hidden - busy
        device, host = sum(parts.values()), work.launches * self.constants.host
        # Both run at once, but neither is even: the longer one, with a share of the shorter one where they are near.
        parts["host"] += (device**3 + host**3) ** (1 / 3) - device
        return parts


def time_step(model: Architecture, run: Settings, work: StepWork, hw: Hardware, constants: TrainingConstants) -> Timing:
    """The seconds of ``work``, see the module."""
    clock = Clock(hw, constants, run)
    pace = constants.framework.get(run.framework, 1.0)
    layer = _stage_seconds(model, run, work, clock)
    head = _both(work.head, clock)
    total = model.layers + model.mtp_layers
    layers = stage_layers(model, run)
    heads = 1 + model.mtp_layers
    # The fullest stage is the last one, with the head, or one with a layer more.
    full: dict[str, float] = defaultdict(float)
    _accumulate(full, layer, layers)
    if run.pp == 1 or total % (run.pp * run.vpp) == 0:
        _accumulate(full, head, heads)
    stage = sum(full.values())
    way = sum(layer.values()) * total + sum(head.values()) * heads + sum(_both(work.embedding, clock).values())
    if run.pp == 1:
        _accumulate(full, _both(work.embedding, clock), 1)
        stage = way
    m = run.microbatches
    parts: dict[str, float] = defaultdict(float)
    for name, seconds in full.items():
        parts[name] += seconds * m
    if run.pp > 1:
        parts["bubble"] = max(0.0, way - stage) / run.vpp
        fixed, each = clock.line("send_recv", "pp")
        tokens = run.microbatch * run.sequence / run.cp / (run.tp if run.sequence_parallel else 1)
        send = fixed + each * tokens * model.hidden * run.itemsize
        parts["stages"] = send * 2 * (m * run.vpp + run.pp - 1) * constants.exposed_sends
    for name in parts:
        parts[name] *= pace
    parts["microbatch"] += m * constants.microbatch
    for name, seconds in _synchronize(run, work, clock, stage).items():
        parts[name] += seconds
    parts["step"] = constants.step
    return Timing(sum(parts.values()), dict(parts))


def _both(work: LayerWork, clock: Clock) -> dict[str, float]:
    parts: dict[str, float] = defaultdict(float)
    _accumulate(parts, clock.work(work.forward), 1)
    _accumulate(parts, clock.work(work.backward), 1)
    return parts


def _accumulate(target: dict[str, float], source: dict[str, float], times: float) -> None:
    for name, seconds in source.items():
        target[name] += seconds * times


def recomputed_share(model: Architecture, run: Settings) -> float:
    """Share of the layers whose forward runs twice."""
    if run.recompute != "full":
        return 0.0
    if not run.recompute_layers:
        return 1.0
    fullest = max(layout(model, run), key=lambda stage: stage.layers)
    return sum(c.again for c in fullest.chunks) / max(1, fullest.layers)


def _stage_seconds(model: Architecture, run: Settings, work: StepWork, clock: Clock) -> dict[str, float]:
    """Part -> seconds of the average layer, forward and backward, with what it recomputes and gathers."""
    total = model.layers + model.mtp_layers
    moe = (model.moe_layers + (model.mtp_layers if model.experts else 0)) / total
    parts: dict[str, float] = defaultdict(float)
    again = recomputed_share(model, run)
    for share, layer in ((1 - moe, work.dense), (moe, work.moe)):
        if not share:
            continue
        forward, backward = clock.work(layer.forward), clock.work(layer.backward)
        _accumulate(parts, forward, share)
        _accumulate(parts, backward, share)
        if again:
            parts["recompute"] += share * again * sum(forward.values())
        elif run.recompute == "selective" and "attention" not in run.fused:
            parts["recompute"] += share * forward.get("attention", 0.0)
        if run.expert_memory != "none" and layer is work.moe:
            parts["recompute"] += share * _experts_again(run, forward)
        if run.recompute_activation:
            parts["recompute"] += share * 0.5 * forward.get("vector", 0.0)
    _offload(model, run, clock, parts)
    for messages, passes in ((work.layer_gather, 2.0), (work.layer_reduce, 1.0)):
        seconds = sum(clock.message(m) for m in messages.messages) * passes
        parts["gathers"] += seconds
    if parts["gathers"]:
        busy = sum(s for n, s in parts.items() if n != "gathers")
        parts["gathers"] = max(parts["gathers"] - busy, 0) + clock.constants.contention * parts["gathers"]
    return parts


def _experts_again(run: Settings, forward: dict[str, float]) -> float:
    """What zero memory of experts runs again: the permutation, and at level 1 the exchange and the first product too
    (two thirds of a gated expert)."""
    seconds = forward.get("permutation", 0.0) / 2
    if run.expert_memory == "level1":
        seconds += forward.get("ep", 0.0) / 2 + forward.get("expert products", 0.0) * 2 / 3
    return seconds


def _offload(model: Architecture, run: Settings, clock: Clock, parts: dict[str, float]) -> None:
    """Activations to the host and back, behind kernels as far as these last."""
    if run.offload not in ("attention", "activations"):
        return
    tokens = run.microbatch * run.sequence / run.cp / run.tp
    if run.offload == "attention":  # queries, keys, values and the output
        each = (model.heads + model.groups) * (model.qk_dim + model.value_dim) * run.itemsize
    else:
        each = model.hidden * (2 + 12 * run.itemsize)
    seconds = 2 * tokens * each / clock.hw.host_bandwidth
    parts["offload"] += max(0.0, seconds - sum(parts.values())) + clock.constants.contention * seconds


def _synchronize(run: Settings, work: StepWork, clock: Clock, stage: float) -> dict[str, float]:
    """Gradients, parameters and optimizer of a step."""
    parts: dict[str, float] = defaultdict(float)
    for message in work.sync.messages:
        seconds = clock.message(message)
        if message.hidden:
            # Behind the last microbatch's backward, or the first one's forward. Of virtual stages the last one to
            # finish (the first to begin) has its own pass alone; the others those of pp microbatches of each after it.
            cover = stage * (0.3 if message.kind == "all_gather" else 0.6) / run.vpp
            last = seconds / run.vpp
            waits = max(0.0, last - cover) + max(0.0, seconds - last - cover * run.pp * (run.vpp - 1))
            seconds = min(seconds, waits + clock.constants.contention * seconds)
        parts["dp"] += seconds
    parts["optimizer"] += sum(float(k.cost.seconds(clock.hw)) * k.times for k in work.update.kernels)
    if run.offload == "optimizer":
        parts["optimizer"] += sum(k.cost.bytes for k in work.update.kernels) / clock.hw.host_bandwidth
    return parts
