"""``mindspeed-fx tune``."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_tune(commands: Any) -> None:
    """The arguments of ``tune``."""
    parser = commands.add_parser(
        "tune",
        help="the fastest settings of a launch script that fit, by the cost model: no device is needed",
        usage="mindspeed-fx tune --devices N [--hardware NAME] [--memory BYTES] [--fix NAME ...] [--json] "
        "-- script arguments",
    )
    parser.add_argument("--devices", type=int, required=True, help="how many run the script")
    parser.add_argument("--hardware", default="ascend910b2", help="a device of the cost model (default: %(default)s)")
    parser.add_argument("--memory", help="of one device, e.g. 60GiB (default: nine tenths of what it has)")
    parser.add_argument(
        "--fix",
        metavar="NAME",
        action="append",
        default=[],
        help="stays as the script has it: tp, pp, vpp, cp, ep, microbatch, recompute, zero or overlap",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=_tune)


def _tune(arg: argparse.Namespace) -> int:
    from mindspeed_fx.planning.tune import report
    from mindspeed_fx.planning.tune.search import tune

    tuned = tune(arg.args, arg.devices, arg.hardware, arg.memory, arg.fix)
    print(json.dumps(report.as_dict(tuned), indent=1) if arg.json else report.text(tuned))
    return 0
