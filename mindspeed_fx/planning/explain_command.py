"""``mindspeed-fx explain``: a script, or a function that returns a model and its inputs, compiled and reported."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import Any


def add_explain(commands: Any) -> None:
    """The arguments of ``explain``."""
    explain = commands.add_parser(
        "explain",
        help="run a script, or a function that returns a model and its inputs, and report every rewrite",
        usage="mindspeed-fx explain SCRIPT.py[:FUNCTION] [--options JSON] [--save DIR] [--measure] [--memory-curve] "
        "[--json] [-- script arguments]",
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
        "--memory-curve",
        action="store_true",
        help="print time against peak memory of every graph: the plans that no other beats in both (plans for a "
        '"memory_budget"; "min" unless the options name one)',
    )
    explain.add_argument("--json", action="store_true", help="print everything but the code as JSON")
    explain.set_defaults(run=_explain)


def _explain(arg: argparse.Namespace) -> int:
    from mindspeed_fx.options import json_object
    from mindspeed_fx.report.memory import pareto

    path, _, function = arg.script.partition(":")
    if not path.endswith(".py"):
        raise ValueError(f"{path!r} is not a Python script")
    options = json_object("--options", arg.options)
    if arg.memory_curve:
        if not function:
            raise ValueError(
                "--memory-curve needs SCRIPT.py:FUNCTION; a script names its own memory_budget, and its report has the "
                "curve"
            )
        options.setdefault("memory_budget", "min")
    if arg.measure and not function:
        raise ValueError(
            "--measure needs SCRIPT.py:FUNCTION, whose model and inputs are a step; a script's is not known"
        )
    report = (
        _explain_function(path, function, options, arg.measure)
        if function
        else _explain_script(path, arg.args, options)
    )
    print(report.to_json() if arg.json else report)
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


def _explain_function(path: str, function: str, options: dict[str, Any], measure: bool) -> Any:
    import mindspeed_fx

    model, args, kwargs = build_model(path, function)
    return mindspeed_fx.explain(model, *args, options=options, measure=measure, **kwargs)


def build_model(path: str, function: str) -> tuple:
    """Model, args and kwargs that a function of a script returns."""
    namespace = runpy.run_path(path)
    if function not in namespace:
        raise ValueError(f"{path} has no function {function!r}")
    result = namespace[function]()
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(f"{function} must return (model, args) or (model, args, kwargs)")
    return (*result, {})[:3]


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
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as e:
                if e.code not in (None, 0):
                    raise ValueError(f"{path} ended with status {e.code}") from e
    finally:
        sys.argv = saved
        os.environ.clear()
        os.environ.update(before)
    return Report(list(graphs), list(breaks))
