"""``mindspeed-fx calibrate``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Callable

from mindspeed_fx.arguments import check_new_file, check_output


def add_calibrate(commands: Any) -> None:
    """The arguments of ``calibrate``."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the device that is here and make it the cost model's, for plans and reports of this machine; "
        "under torchrun with its network",
    )
    parser.add_argument("--device", help="cpu, cuda or npu (default: the accelerator that is here, else cpu)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing, about (default: %(default)s)")
    parser.add_argument("--kinds", default="", help="some of product,attention,vector,launch (default: all)")
    parser.add_argument(
        "--dtypes", default="", help="some of float32,bfloat16,float16,float64 (default: the first two)"
    )
    parser.add_argument("--small", action="store_true", help="few small cases of each kind, to try it out")
    parser.add_argument("--base", help="the table that gives what is not measured (default: the device's, or nearest)")
    parser.add_argument("--accept-noise", action="store_true", help="fit timings that vary too much, too")
    parser.add_argument("--out", metavar="FILE", help="write the table there (default: where hardware=None finds it)")
    parser.add_argument("--page", metavar="FILE.html", help="also write constants and residuals as one page")
    parser.set_defaults(run=_calibrate)


def _calibrate(arg: argparse.Namespace) -> int:
    from mindspeed_fx.planning.calibrate import DTYPES, KINDS, NoisyError, calibrate, page

    check_output("--page", arg.page)  # not after minutes of work
    if arg.out is not None:
        check_new_file("--out", arg.out)
    show = os.environ.get("RANK", "0") == "0"
    try:
        result = calibrate(
            arg.device,
            seconds=arg.seconds,
            kinds=tuple(arg.kinds.split(",")) if arg.kinds else KINDS,
            dtypes=tuple(arg.dtypes.split(",")) if arg.dtypes else DTYPES,
            small=arg.small,
            path=arg.out,
            accept_noise=arg.accept_noise,
            base=arg.base,
            progress=_progress() if show else lambda text: None,
        )
    except NoisyError as e:
        print(f"mindspeed-fx calibrate: {e}", file=sys.stderr)
        return 1
    if result is None:
        return 0
    print(page.text(result))
    if arg.page:
        with open(arg.page, "w") as file:
            file.write(page.html(result))
        print(f"page: {arg.page}", file=sys.stderr)
    return 0


def _progress() -> Callable[[str], None]:
    """A bar by tqdm where it is installed, else a line for each case."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda text: print(text, file=sys.stderr, flush=True)
    bars: list[Any] = []

    def tell(text: str) -> None:
        if not bars:  # none before the arguments are known to be right
            bars.append(tqdm(unit=" cases", file=sys.stderr, bar_format="{n} cases in {elapsed}: {desc}"))
        bars[0].set_description_str(text)
        bars[0].update()

    return tell
