"""``mindspeed-fx verify-device``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from mindspeed_fx.arguments import check_new_file


def add_verify_device(commands: Any) -> None:
    """The arguments of ``verify-device``."""
    parser = commands.add_parser(
        "verify-device",
        help="run every operator, kernel, fusion and (under torchrun) collective on this device against its "
        "reference, time them, and write one file that can be sent back",
    )
    parser.add_argument("--device", help="cpu, cuda or npu (default: the accelerator that is here, else cpu)")
    parser.add_argument("--emulated", action="store_true", help="run the graphs of --device on the processor")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most (default: %(default)s)")
    parser.add_argument("--kinds", default="", help="some of operator,kernel,fusion,collective,time (default: all)")
    parser.add_argument("--dtypes", default="", help="some of float32,bfloat16,float16 (default: the first two)")
    parser.add_argument("--only", default="", metavar="REGEX", help="checks whose key matches")
    parser.add_argument("--small", action="store_true", help="time tensors of a few elements, to try it out")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever an earlier run has done")
    parser.add_argument("--out", default="verify_device.json", metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=_verify)


def _verify(arg: argparse.Namespace) -> int:
    from mindspeed_fx.planning.verify_device import KINDS, find_place, page, supervise, verify_device

    check_new_file("--out", arg.out)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 or arg.in_process:
        content = verify_device(
            arg.device,
            out=arg.out,
            minutes=arg.minutes,
            kinds=tuple(arg.kinds.split(",")) if arg.kinds else KINDS,
            dtypes=tuple(arg.dtypes.split(",")) if arg.dtypes else ("float32", "bfloat16"),
            only=arg.only,
            emulated=arg.emulated,
            small=arg.small,
            fresh=arg.fresh,
            progress=lambda key: print(key, file=sys.stderr, flush=True),
        )
        if content is None:
            return 0
    else:
        find_place(arg.device, arg.emulated)  # a wrong device is one error, not that of a process
        if code := supervise.run(_words(arg), arg.out, arg.minutes):
            return code
        with open(arg.out) as file:
            content = json.load(file)
    if not arg.in_process:
        print(page.text(content))
        print(f"file: {arg.out}", file=sys.stderr)
    return 1 if content["counts"]["failed"] else 0


def _words(arg: argparse.Namespace) -> list[str]:
    """The same command as one that runs the checks itself."""
    words = ["verify-device", "--in-process", f"--out={arg.out}"]
    words += [f"--{n}={getattr(arg, n)}" for n in ("device", "kinds", "dtypes", "only") if getattr(arg, n)]
    return words + [f"--{n}" for n in ("emulated", "small", "fresh") if getattr(arg, n)]
