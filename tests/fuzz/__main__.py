"""``python -m tests.fuzz``: programs at random until the time is over, or one seed shown."""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import sys
import time
import traceback
import warnings

import torch

from tests import forks

from . import graphs, layer_lists, layer_steps
from .generate import generate
from .runner import Tally, count, run_seed, script, shrink, told


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="when to begin no further program")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--count", type=int, help="programs to run, whatever the time")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager")
    parser.add_argument(
        "--graphs", action="store_true", help="with --codegen inductor: its graphs run operator by operator, no C++"
    )
    parser.add_argument("--layers", type=int, default=0, help="models of so many layers that are alike, 8 for example")
    parser.add_argument(
        "--lists", action="store_true", help="models of layers in a list, of which Dynamo reads one (layer_lists.py)"
    )
    parser.add_argument("--show", action="store_true", help="print the program of --seed as a script and run nothing")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they are")
    parser.add_argument("--shrink-seconds", type=float, default=90.0)
    parser.add_argument("--device", default="cpu", help="where programs run")
    options = parser.parse_args(arguments)
    torch.set_default_device(None if options.device == "cpu" else options.device)
    if options.lists and (options.layers or options.graphs):
        parser.error("--lists are programs of their own: neither --layers nor --graphs")
    if options.show:
        print(layer_lists.generate(options.seed).text() if options.lists else _script(options))
        return 0
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    forks.leave_imports_alone()
    if options.graphs and options.codegen != "inductor":
        parser.error("--graphs are Inductor's: give --codegen inductor")
    stack = contextlib.ExitStack()
    if options.graphs:
        stack.enter_context(graphs.interpreted())
    with stack:
        return run_lists(options) if options.lists else run(options)


def _script(options: argparse.Namespace) -> str:
    return script(generate(options.seed, options.codegen, options.layers))


def _goes_on(options: argparse.Namespace, programs: int, start: float) -> bool:
    return programs < options.count if options.count else time.monotonic() - start < 60 * options.minutes


def run(options: argparse.Namespace) -> int:
    tally, start, seed = Tally(), time.monotonic(), options.seed
    while _goes_on(options, tally.programs, start):
        try:
            case, verdict = run_seed(seed, options.codegen, options.layers)
        except KeyboardInterrupt:
            break  # and say what was done until then
        except Exception:  # of the generator or of eager PyTorch: the next seeds are none the worse for it
            print(f"seed {seed}: not run\n{traceback.format_exc()}", flush=True)
            tally.errors, seed = tally.errors + 1, seed + 1
            continue
        count(tally, case, verdict)
        if verdict.failure:
            whose = "torch's own backend too; " if verdict.theirs else ""
            print(
                f"seed {seed}: {whose}{verdict.failure.kind}, {verdict.failure.where}: {verdict.failure.detail[:300]}",
                flush=True,
            )
            if not verdict.theirs and not options.no_shrink:
                print(told(shrink(case, verdict.failure, options.shrink_seconds), verdict.failure), flush=True)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}, {time.monotonic() - start:.0f} s: {tally}")
    print("rewrites:", ", ".join(f"{name} {n}" for name, n in tally.rewrites.most_common()) or "none")
    return 1 if tally.failures or tally.errors else 0


def run_lists(options: argparse.Namespace) -> int:
    logging.getLogger("mindspeed_fx").setLevel(logging.CRITICAL)
    start, seed, counts = time.monotonic(), options.seed, collections.Counter()
    while _goes_on(options, seed - options.seed, start):
        program = layer_lists.generate(seed)
        outcome = layer_steps.judge(program, options.codegen)
        counts += collections.Counter(
            steps=outcome.steps,
            failures=outcome.failure is not None and not outcome.theirs,
            theirs=outcome.theirs,
            regions=outcome.regions > 0,
        )
        if failure := outcome.failure:
            whose = "torch's own backend too; " if outcome.theirs else ""
            print(f"seed {seed}: {whose}{failure.kind}, {failure.where}: {failure.detail[:300]}", flush=True)
            if not outcome.theirs and not options.no_shrink:
                smaller = layer_steps.shrink(program, failure, options.shrink_seconds, options.codegen)
                print(smaller.text(), smaller.changes, sorted(smaller.settings), flush=True)
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}, {time.monotonic() - start:.0f} s: {counts['steps']} steps compared")
    print(
        f"programs whose layers were read once: {counts['regions']}; failures: {counts['failures']}, and "
        f"{counts['theirs']} of torch's own backend too"
    )
    return int(counts["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
