"""A tuned launch as text."""

from __future__ import annotations

import shlex

from mindspeed_fx.planning.predict.best import describe
from mindspeed_fx.planning.predict.prediction import Prediction
from mindspeed_fx.planning.tune.search import Tuned


def text(tuned: Tuned) -> str:
    """Both settings with their steps and intervals, the reasons, and the arguments to paste."""
    launch, own, best = tuned.launch, tuned.as_it_is, tuned.best
    shape = launch.model
    lines = [
        f"{shape.layers} layers of {shape.hidden}, {shape.parameters / 1e9:.2f} G parameters, on "
        f"{launch.settings.devices} {own.hardware} ({own.basis}), {tuned.memory / 2**30:.1f} GiB of each; modelled",
        _line("as it is", own) + ("" if tuned.fits else "; does not fit"),
        _line("suggested", best) if tuned.is_changed else "suggested  nothing: no settings are modelled faster by 2 %",
        f"{tuned.tried} settings timed, {tuned.too_large} do not fit",
    ]
    if tuned.is_changed and tuned.fits:
        lines.append(_gain(own, best))
    lines += [f"   {reason}" for reason in tuned.reasons]
    lines += [f"kept: {name} ({why})" for name, why in launch.held.items()]
    if tuned.refused:
        lines.append(f"faster settings were refused by {', '.join(tuned.refused)}")
    if launch.not_modelled:
        lines.append(f"not in the model, or not whole: {', '.join(launch.not_modelled)}")
    if tuned.is_changed:
        new, gone = tuned.changes
        lines.append("changed: " + " ".join(shlex.join(group) for group in new))
        lines += [f"removed: {' '.join(gone)}"] if gone else []
        lines += ["", shlex.join(tuned.words)]
    return "\n".join(lines)


def _line(name: str, prediction: Prediction) -> str:
    low, high = prediction.interval
    assert prediction.settings is not None
    run = prediction.settings
    kind = f" ({run.cp_kind})" if run.cp > 1 else ""
    return (
        f"{name:10} step {prediction.seconds:.4g} s ({low:.4g} to {high:.4g}), "
        f"{prediction.memory.peak / 2**30:.1f} GiB, MFU {100 * prediction.mfu:.1f} %: {describe(run)}{kind}"
    )


def _gain(own: Prediction, best: Prediction) -> str:
    ratio = own.seconds / best.seconds
    low, high = best.interval
    if low <= own.seconds <= high:
        return f"{ratio:.2f} times as fast, which is within the model's interval: measure both"
    return f"{ratio:.2f} times as fast, which is beyond the model's interval"


def as_dict(tuned: Tuned) -> dict:
    """Plain values, ready for JSON: seconds and bytes."""
    own, best = tuned.as_it_is, tuned.best
    new, gone = tuned.changes
    return {
        "as_it_is": {"seconds": own.seconds, "interval": own.interval, "memory": own.memory.peak, "fits": tuned.fits},
        "suggested": {"seconds": best.seconds, "interval": best.interval, "memory": best.memory.peak},
        "reasons": tuned.reasons,
        "kept": tuned.launch.held,
        "changed": new,
        "removed": gone,
        "arguments": tuned.words,
    }
