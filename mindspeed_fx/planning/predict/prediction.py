"""What :func:`predict` returns, and the function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.cost.hardware import hardware as device
from mindspeed_fx.cost.training import interval_of, training_constants
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict.architecture import Architecture
from mindspeed_fx.planning.predict.architectures import architecture
from mindspeed_fx.planning.predict.memory import Memory, peak_memory
from mindspeed_fx.planning.predict.settings import Settings, settings
from mindspeed_fx.planning.predict.step_work import step_work
from mindspeed_fx.planning.predict.timing import time_step, times_from

SMALL = 3e9
"""Parameters below which a step is launches and vector kernels as much as products."""


@dataclass
class Prediction:
    """Modelled, never measured."""

    seconds: float
    """Of a step."""
    interval: tuple[float, float]
    """Seconds in which four of five published runs of this class are, their family left out of the fits."""
    tokens_per_second: float
    """Of each device."""
    mfu: float
    """Model FLOP over the peak of the matrix units in this precision; a half of causal attention's scores counts."""
    memory: Memory
    parts: dict[str, float] = field(default_factory=dict)
    """Part of the step -> seconds on the fullest rank."""
    times_from: dict[str, str] = field(default_factory=dict)
    """Part with products or attention -> the measured kernels that its time is taken from, or "formula"."""
    hardware: str = ""
    basis: str = ""
    """What the device's constants are fitted to, or "by data sheet alone"."""
    settings: Settings | None = None

    def __str__(self) -> str:
        low, high = self.interval
        lines = [
            f"{self.hardware}, {self.basis}; modelled",
            f"step {self.seconds:.4g} s ({low:.4g} to {high:.4g}), {self.tokens_per_second:,.0f} tokens/s a device, "
            f"MFU {100 * self.mfu:.1f} %",
            f"memory {self.memory.peak / 2**30:.1f} GiB a device: "
            + ", ".join(f"{name} {n / 2**30:.1f}" for name, n in self.memory.parts.items()),
        ]
        for name, seconds in sorted(self.parts.items(), key=lambda item: -item[1]):
            if seconds > 0.002 * self.seconds:
                share = 100 * seconds / self.seconds
                lines.append(f"   {name:20} {seconds:10.4g} s {share:5.1f} %  {self.times_from.get(name, '')}".rstrip())
        return "\n".join(lines)


def error_class(model: Architecture) -> str:
    """The class of runs whose errors the interval shows."""
    if model.experts:
        return "experts"
    return "small" if model.parameters < SMALL else "dense"


def predict(model: Any, run: "Settings | dict[str, Any]", hardware: "str | Hardware" = "ascend910b2") -> Prediction:
    """Seconds, throughput and peak memory of a training step, from a description alone.

    Args:
        model: an :class:`Architecture`, its fields as a dict, a published name ("llama3-8b") or the flags of a Megatron
            launch.
        run: :class:`Settings`, or its fields as a dict; batch and microbatch may be any size.
        hardware: a device of the cost model.

    Returns:
        :class:`Prediction`.

    Raises:
        OptionError: unknown names, or sizes that do not divide each other.
    """
    shape, run, hw = architecture(model), settings(run), device(hardware)
    # Embedding and head may each be a layer of the layout, as in Llama 3 405B: 126 layers on 128 stages.
    if run.pp * run.vpp > shape.layers + shape.mtp_layers + 2:
        raise OptionError(f"settings: pp={run.pp} x vpp={run.vpp} stages, and the model has {shape.layers} layers")
    constants = training_constants(hw)
    work = step_work(shape, run)
    timing = time_step(shape, run, work, hw, constants)
    throughput = run.tokens / run.devices / timing.seconds
    low, high = interval_of(hw, error_class(shape))
    return Prediction(
        timing.seconds,
        (timing.seconds * low, timing.seconds * high),
        throughput,
        throughput * shape.flops(run.sequence) / hw.matrix[hw.substitute("matrix", run.precision)],
        peak_memory(shape, run, hw.target),
        timing.parts,
        times_from(run, work, hw, constants),
        hw.title,
        hw.basis,
        run,
    )
