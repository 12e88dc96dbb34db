"""Launches of experts beside the best settings of the same space, under the cost model.

    python -m benchmarks.launch_plans FILE... [--hardware ascend910b2]

FILE has launches as {name: {"world": processes, "args": flags}}. Each launch that describes a model is read as it
stands and predicted; the search keeps its devices, lengths, batch, precision, operators and savers of memory, and
chooses mesh, virtual stages, microbatch, ZeRO stage and recompute. The launch itself is one of the candidates, so that
the search is never slower. Everything is modelled.
"""

from __future__ import annotations

import argparse
import json
import re
import time

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.predict import Prediction, architecture, best_settings, predict, settings_from_flags
from mindspeed_fx.planning.predict.best import describe

KEPT = (
    "devices sequence batch precision float32_gradients fused optimizer framework dispatcher lora overlap_gradients "
    "overlap_parameters overlap_tp cp_kind recompute_activation reuse_float32 offload"
).split()
"""Settings that the search does not choose."""


def largest(prediction: Prediction, count: int = 3) -> str:
    """Where most of the time goes."""
    parts = sorted(prediction.parts.items(), key=lambda p: -p[1])[:count]
    return ", ".join(f"{name} {100 * seconds / prediction.seconds:.0f} %" for name, seconds in parts)


def compare(name: str, launch: dict, device: str) -> str:
    """One line for the launch, one for the best."""
    model = architecture(launch["args"])
    run = settings_from_flags(launch["args"], int(launch["world"]))
    own = predict(model, run, device)
    limit = max(0.9 * hardware(device).memory, own.memory.peak)
    start = time.perf_counter()
    kept = {k: getattr(run, k) for k in KEPT} | {"batch": run.batch or run.dp * run.microbatch}
    try:
        best = best_settings(model, kept, device, limit, keep=1).best
    except OptionError:
        best = own
    best = own if own.seconds <= best.seconds else best
    seconds = time.perf_counter() - start
    note = "" if own.memory.peak <= 0.9 * hardware(device).memory else "  (does not fit by the model)"
    return (
        f"{name[:58]:58} {run.devices:5} {model.parameters / 1e9:7.1f}B\n"
        f"   launch {own.seconds:9.3f} s {own.memory.peak / 2**30:6.1f} GiB  {describe(run)}; {largest(own)}{note}\n"
        f"   best   {best.seconds:9.3f} s {best.memory.peak / 2**30:6.1f} GiB  {describe(best.settings)}; "
        f"{largest(best)}  ({100 * (own.seconds / best.seconds - 1):.0f} % faster, searched in {seconds:.1f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--hardware", default="ascend910b2", help="for launches whose name has no A3")
    arg = parser.parse_args()
    done, refused = 0, []
    for file in arg.files:
        with open(file) as f:
            launches = json.load(f)
        for name, launch in launches.items():
            device = "ascend910c" if re.search(r"_A3", name) else arg.hardware
            try:
                print(compare(name, launch, device), flush=True)
                done += 1
            except OptionError as error:
                refused.append(f"{name}: {error}")
    print(f"\n{done} launches; not described:\n" + "\n".join(f"   {r[:150]}" for r in refused))


if __name__ == "__main__":
    main()
