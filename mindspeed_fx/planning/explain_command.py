"""``mindspeed-fx explain``: a script, or a function that returns a model and its inputs, compiled and reported."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import Any

from mindspeed_fx.arguments import check_call
from mindspeed_fx.planning.user_script import build_model, failures, split_source
from mindspeed_fx.report.terminal import show


def add_explain(commands: Any) -> None:
    """The arguments of ``explain``."""
    explain = commands.add_parser(
        "explain",
        help="run a script, or a function that returns a model and its inputs, and report every rewrite",
        usage="mindspeed-fx explain SCRIPT.py[:FUNCTION] [--options JSON] [--save DIR] [--measure] [--what-if] "
        "[--memory-curve] [--json] [-- script arguments]",
    )
    explain.add_argument(
        "script",
        help='SCRIPT.py, whose torch.compile(..., backend="mindspeed") calls are reported, or SCRIPT.py:FUNCTION, '
        "which returns (model, args) or (model, args, kwargs)",
    )
    explain.add_argument(
        "--options", default="{}", help="backend options as JSON; what a SCRIPT.py gives in its own code wins"
    )
    explain.add_argument("--save", metavar="DIR", help="write before/after files, index and HTML report")
    explain.add_argument(
        "--measure",
        action="store_true",
        help="of SCRIPT.py:FUNCTION also time the step on the device that is here, whole, without each family of "
        "rewrites, and by kernel: what each rewrite bought, and where the cost model is wrong",
    )
    explain.add_argument(
        "--what-if",
        action="store_true",
        help="of SCRIPT.py:FUNCTION also model the step at the other levels, without each family of rewrites and with "
        "larger batches, for the page's and the dump's answers",
    )
    explain.add_argument(
        "--memory-curve",
        action="store_true",
        help="print time against peak memory of every graph: the plans that no other beats in both (plans for a "
        '"memory_budget"; "min" unless the options name one)',
    )
    explain.add_argument("--json", action="store_true", help="print everything but the code as JSON")
    explain.set_defaults(run=_explain)


def _explain(arg: argparse.Namespace) -> int:
    from mindspeed_fx.arguments import json_object
    from mindspeed_fx.report.memory import pareto

    path, function = split_source(arg.script, needs_function=False)
    options = json_object("--options", arg.options)
    if arg.memory_curve:
        if not function:
            raise ValueError(
                "--memory-curve needs SCRIPT.py:FUNCTION; a script names its own memory_budget, and its report has the "
                "curve"
            )
        options.setdefault("memory_budget", "min")
    if arg.args and function:
        raise ValueError(f"-- {' '.join(arg.args)}: {arg.script} is called without arguments; a script alone gets them")
    if arg.save is not None and (not arg.save or os.path.isfile(arg.save)):
        raise ValueError(f"--save {arg.save}: a directory is expected{', and this is a file' * bool(arg.save)}")
    for name in ("measure", "what_if"):
        if getattr(arg, name) and not function:
            raise ValueError(
                f"--{name.replace('_', '-')} needs SCRIPT.py:FUNCTION, whose model and inputs are a step; a "
                "script's is not known"
            )
    report = (
        _explain_function(path, function, options, arg.measure, arg.what_if)
        if function
        else _explain_script(path, arg.args, options)
    )
    if arg.json:
        print(report.to_json())
    else:
        show(str(report))
    for n, points in enumerate(report.pareto if arg.memory_curve and not arg.json else ()):
        print(
            f"graph {n}: time against peak, modelled\n{pareto(points)}"
            if points
            else f"graph {n}: no plan; there is no backward to plan for"
        )
    if arg.save:
        print(f"report: {report.save(arg.save) / 'index.html'}", file=sys.stderr)
    if not report.graphs:
        print(f'mindspeed-fx explain: {arg.script} compiled nothing with backend="mindspeed"', file=sys.stderr)
        return 1
    return 0


def _explain_function(path: str, function: str, options: dict[str, Any], measure: bool, what_if: bool) -> Any:
    import mindspeed_fx

    model, args, kwargs = build_model(path, function)
    check_call("explain", args, kwargs)
    with failures(path):
        return mindspeed_fx.explain(model, *args, options=options, measure=measure, what_if=what_if, **kwargs)


def _explain_script(path: str, arguments: list[str], options: dict[str, Any]) -> Any:
    """Runs the script; ``options`` reach its compilations through the environment, so that what its code gives wins."""
    from mindspeed_fx.compat import dynamo
    from mindspeed_fx.options import Options, environment
    from mindspeed_fx.planning.explain import Report
    from mindspeed_fx.report import recorder

    Options.parse(options)
    saved, sys.argv = sys.argv, [path, *arguments]
    before = dict(os.environ)
    os.environ.update(environment(options))
    try:
        with recorder.collecting() as graphs, dynamo.collecting_graph_breaks() as breaks:
            with failures(path):
                runpy.run_path(os.path.abspath(path), run_name="__main__")
    finally:
        sys.argv = saved
        os.environ.clear()
        os.environ.update(before)
    return Report(list(graphs), list(breaks))
