"""The ``mindspeed-fx`` command; ``mindspeed-fx --help`` lists what it does."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any, NoReturn

from mindspeed_fx.arguments import check_file, check_output
from mindspeed_fx.errors import nearest
from mindspeed_fx.planning.ask_command import add_ask
from mindspeed_fx.planning.calibrate.command import add_calibrate
from mindspeed_fx.planning.explain_command import add_explain
from mindspeed_fx.planning.tune.command import add_tune
from mindspeed_fx.planning.user_script import build_model, split_source
from mindspeed_fx.planning.verify_device.command import add_verify_device


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status (0 fine, 1 the answer is bad news, 2 wrong usage)."""
    argv = sys.argv[1:] if argv is None else argv
    own, script_arguments = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = _parser()
    args, unknown = parser.parse_known_args(own)
    if unknown:
        _refuse_unknown(parser, args.command, unknown)
    if script_arguments and args.command not in WITH_ARGUMENTS:
        parser.error(
            f"{args.command} runs no script that takes {' '.join(['--', *script_arguments])}; "
            f"valid with {', '.join(WITH_ARGUMENTS)}"
        )
    args.args = script_arguments
    try:
        return args.run(args)
    except (ValueError, ImportError, OSError) as e:
        text = str(e).removeprefix(f"{args.command}: ")  # which functions of the command's name begin with
        print(f"mindspeed-fx {args.command}: {text}", file=sys.stderr)
        return 2


WITH_ARGUMENTS = ("explain", "flags", "tune")
"""Commands that take a script's arguments after "--"."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest word."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: command"):
            commands = next(a for a in self._actions if isinstance(a, argparse._SubParsersAction))
            message = f"a command is expected, of {', '.join(commands.choices)}"
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        close = nearest(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        self.exit(2, f"{self.prog}: {message}{close}; {self.prog} --help tells more\n")


def _refuse_unknown(parser: argparse.ArgumentParser, command: str, words: list[str]) -> NoReturn:
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    own = commands.choices[command]
    close = nearest(words[0], own._option_string_actions)
    rest = "; arguments of a script go after --" if command in WITH_ARGUMENTS else ""
    own.error(f"unrecognized arguments: {' '.join(words)}{close}{rest}")
    raise AssertionError("argparse ends the process")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mindspeed-fx", description="MindSpeed as a torch.compile backend: see what it does to a model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shown = (_add_doctor, _add_passes, _add_flags, _add_cross)
    measured = (add_calibrate, add_verify_device)
    for add in (add_explain, add_ask, *shown, _add_plan, add_tune, *measured, _add_toolchain, _add_compare_dumps):
        add(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    """The arguments of ``doctor``."""
    doctor = commands.add_parser("doctor", help="what is installed, which targets work, and why not")
    doctor.add_argument("--json", action="store_true", help="print the answer as JSON")
    doctor.set_defaults(run=_doctor)


def _add_passes(commands: Any) -> None:
    """``passes`` takes none."""
    commands.add_parser("passes", help="the registered passes").set_defaults(run=_passes)


def _add_flags(commands: Any) -> None:
    """The arguments of ``flags``."""
    flags = commands.add_parser(
        "flags",
        help="what becomes of each flag of a MindSpeed or MindSpeed-LLM run, before it; without arguments the whole "
        "table",
        usage="mindspeed-fx flags [--file ARGS.json] [--page] [--conflicts] [--json] [-- script arguments]",
    )
    flags.add_argument("--file", metavar="ARGS.json", help="a JSON list of the script's arguments")
    flags.add_argument("--page", action="store_true", help="print the table as docs/mindspeed_flags.md has it")
    flags.add_argument("--conflicts", action="store_true", help="print the pairs of which MindSpeed takes one")
    flags.add_argument("--json", action="store_true", help="print the answer as JSON")
    flags.set_defaults(run=_flags)


def _add_cross(commands: Any) -> None:
    """The arguments of ``cross``."""
    cross = commands.add_parser(
        "cross", help="compile for an Ascend NPU on a machine that has none, and report what it would run"
    )
    cross.add_argument(
        "source",
        metavar="SCRIPT.py:FUNCTION",
        help="the function returns (model, args) or (model, args, kwargs); it is called under the meta device, so "
        "weights take no memory",
    )
    cross.add_argument(
        "--soc",
        default="Ascend910B2",
        help="Ascend910B1 to B4, B2C, B4-1, Ascend910_9391, _9392, _9382, _9381, _9372, _9362 (default: %(default)s)",
    )
    cross.add_argument("--options", default="{}", help="backend options as JSON")
    cross.add_argument("--no-baseline", action="store_true", help="do not also trace without passes to compare with")
    cross.add_argument("--no-kernels", action="store_true", help="do not compile the Triton kernels for the SoC")
    cross.add_argument(
        "--dir", help="of the tool chain (default: $MINDSPEED_FX_TOOLCHAIN, else the user's cache directory)"
    )
    cross.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    cross.add_argument("--html", metavar="FILE", help="also write one HTML page")
    cross.set_defaults(run=_cross)


def _add_plan(commands: Any) -> None:
    """The arguments of ``plan``."""
    plan = commands.add_parser(
        "plan",
        help="search the fastest way to divide a model over devices, by the cost model alone: no device and no process "
        "group is needed",
    )
    plan.add_argument(
        "source",
        metavar="SCRIPT.py:FUNCTION",
        help="the function returns (model, args) or (model, args, kwargs) with the whole batch of a step; it is called "
        "under the meta device, so weights take no memory",
    )
    plan.add_argument("--devices", type=int, help="how many; or --mesh")
    plan.add_argument("--mesh", help="sizes that are given, e.g. dp=8,tp=8")
    plan.add_argument("--hardware", default="ascend910b2", help="a device of the cost model (default: %(default)s)")
    plan.add_argument("--memory", help="of one device, e.g. 60GiB (default: nine tenths of what it has)")
    plan.add_argument(
        "--optimizer", default="adam", help="adam, momentum or sgd: what it stores (default: %(default)s)"
    )
    plan.add_argument("--keep", type=int, default=5, help="how many meshes to print (default: %(default)s)")
    plan.add_argument("--no-pipeline", action="store_true", help="leave out pipeline stages, which pipeline_stage runs")
    plan.add_argument(
        "--explain",
        metavar="PARAMETER",
        action="append",
        default=[],
        help="say why this parameter, or module, is placed as it is",
    )
    plan.add_argument("--save", metavar="FILE", help="write the best plan as YAML, or JSON by its name")
    plan.add_argument("--html", metavar="FILE", help="write a picture of the best plan")
    plan.add_argument("--json", action="store_true", help="print everything as JSON")
    plan.set_defaults(run=_plan)


def _add_compare_dumps(commands: Any) -> None:
    """The arguments of ``compare-dumps``."""
    text = "tensors of modules that two runs wrote: the differences, and the first module that has one"
    compare = commands.add_parser("compare-dumps", help=text)
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.add_argument("--rtol", type=float, default=1e-5, help="of A's elements (default: %(default)s)")
    compare.add_argument("--atol", type=float, default=1e-8, help="(default: %(default)s)")
    compare.set_defaults(run=_compare_dumps)


def _compare_dumps(arg: argparse.Namespace) -> int:
    from mindspeed_fx.training.tensor_dump import compare_dumps, describe

    differences = compare_dumps(arg.a, arg.b, arg.rtol, arg.atol)
    print(describe(differences))
    return 1 if any(d.is_beyond for d in differences) else 0


def _add_toolchain(commands: Any) -> None:
    """The arguments of ``toolchain``."""
    toolchain = commands.add_parser(
        "toolchain",
        help="the Ascend tool chain that cross-compiling needs: install it into a directory of its own, or see what is "
        "there",
    )
    toolchain.add_argument("action", choices=("install", "status"))
    toolchain.add_argument(
        "components", nargs="*", metavar="COMPONENT", help="torch_npu, triton_ascend, torch_mlir; none means all"
    )
    toolchain.add_argument("--dir", help="where (default: $MINDSPEED_FX_TOOLCHAIN, else the user's cache directory)")
    toolchain.add_argument("--json", action="store_true", help="print the answer as JSON")
    toolchain.set_defaults(run=_toolchain)


def _plan(arg: argparse.Namespace) -> int:
    import torch

    import mindspeed_fx

    path, function = split_source(arg.source)
    if arg.devices is None and arg.mesh is None:
        raise ValueError("neither --devices nor --mesh; one of them is expected, as in --devices 8 or --mesh dp=4,tp=2")
    mesh = None if arg.mesh is None else _mesh(arg.mesh)
    check_output("--save", arg.save)
    check_output("--html", arg.html)
    with torch.device("meta"):
        model, args, kwargs = build_model(path, function)
    plan = mindspeed_fx.plan(
        model,
        args,
        kwargs,
        devices=arg.devices,
        mesh=mesh,
        hardware=arg.hardware,
        memory=arg.memory,
        keep=arg.keep,
        optimizer=arg.optimizer,
        pipeline=not arg.no_pipeline,
    )
    why = {name: plan.explain(name) for name in arg.explain}
    print(
        json.dumps({**plan.summary(), "explained": why}, indent=1)
        if arg.json
        else "\n".join([str(plan), *why.values()])
    )
    if arg.save:
        plan.save(arg.save)
        print(f"plan: {arg.save}", file=sys.stderr)
    if arg.html:
        plan.save_picture(arg.html)
        print(f"picture: {arg.html}", file=sys.stderr)
    return 1 if plan.unsupported else 0


def _mesh(text: str) -> dict[str, int]:
    """The sizes of "dp=8,tp=8"."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip() or not size.strip().lstrip("-").isdigit():
            raise ValueError(f"--mesh {text!r}: sizes as in dp=8,tp=8 are expected")
        if name.strip() in sizes:
            raise ValueError(f"--mesh {text!r} names {name.strip()} twice; each dimension once is expected")
        sizes[name.strip()] = int(size)
    return sizes


def _passes(arg: argparse.Namespace) -> int:
    from mindspeed_fx import passes
    from mindspeed_fx.passes.manager import ROWS, in_order

    for p in in_order(passes.registered()):
        level = f"level {p.level}" if p.level < 3 else "on request"
        print(
            f"{p.name:<38} {p.stage:<11} {level:<10} {'exact' if p.exact else 'close':<5}  "
            f"{ROWS[p.name].why if p.name in ROWS else p.description}"
        )
    return 0


def _flags(arg: argparse.Namespace) -> int:
    from mindspeed_fx.megatron.flags import account, conflicts, explain, page

    words = [*_words_of_file(arg.file), *arg.args]
    for name in ("page", "conflicts"):
        if getattr(arg, name) and words:
            raise ValueError(
                f"--{name} prints the whole table, and takes no arguments of a script; leave one of them out"
            )
    if arg.conflicts:
        print(conflicts.page(), end="")
        return 0
    if not words:
        print(page.page() if arg.page else page.text(), end="" if arg.page else "\n")
        return 0
    accounts = explain(words)
    if arg.json:
        print(json.dumps(account.as_dicts(accounts), indent=1))
    else:
        for line in accounts:
            print(f"{'refused' if line.is_refused else line.state:<10} {line.flag}: {line.text}")
    return 1 if any(a.is_refused for a in accounts) else 0


def _words_of_file(path: str | None) -> list[str]:
    """The words that a JSON file lists."""
    if path is None:
        return []
    check_file("--file", path)
    with open(path) as file:
        try:
            words = json.load(file)
        except ValueError as e:
            raise ValueError(f"--file {path} is not JSON ({e}); a list of words is expected") from None
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise ValueError(f'{path} is no JSON list of words, as in ["--num-layers", "4"]')
    return words


def _cross(arg: argparse.Namespace) -> int:
    from mindspeed_fx.arguments import json_object
    from mindspeed_fx.ascend.compile import CrossError, cross_compile

    options = json_object("--options", arg.options)
    split_source(arg.source)
    for name, path in (("--json", arg.json), ("--html", arg.html)):  # not after minutes of work
        check_output(name, path)
    try:
        report = cross_compile(
            arg.source,
            soc=arg.soc,
            options=options,
            baseline=not arg.no_baseline,
            kernels=not arg.no_kernels,
            toolchain=arg.dir,
        )
    except CrossError as e:
        print(f"{e.frames}mindspeed-fx cross: {e}", file=sys.stderr)
        return 2
    print(report)
    for path in filter(None, (arg.json, arg.html)):
        print(f"report: {report.save(path)}", file=sys.stderr)
    return 1 if report.without_gradient else 0


def _toolchain(arg: argparse.Namespace) -> int:
    from mindspeed_fx.ascend import toolchain as toolchain_ascend

    if arg.action == "install":
        rows = toolchain_ascend.install(arg.dir, arg.components, log=lambda line: print(line, file=sys.stderr))
    else:
        rows = toolchain_ascend.status(arg.dir, arg.components)
    if arg.json:
        print(json.dumps(rows, indent=1))
    else:
        for r in rows:
            print(
                f"{r['name']:<14} {'installed' if r['installed'] else 'missing':<10} {' '.join(r['packages']):<60} "
                f"{r['serves']}"
            )
    return 0 if all(r["installed"] for r in rows) else 1


def _doctor(arg: argparse.Namespace) -> int:
    from mindspeed_fx.report import doctor

    result = doctor.examine()
    print(json.dumps(result, indent=1) if arg.json else doctor.text(result))
    return 0 if any(t["works"] for t in result["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
