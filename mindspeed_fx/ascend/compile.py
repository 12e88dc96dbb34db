"""``mindspeed_fx.cross_compile``: the graphs that an NPU would run, made on a machine without one.

The work is done by a process of its own that has torch_npu (see :mod:`mindspeed_fx.ascend.stub`); this one only sends a
model without its values and reads the answer.
"""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable

import mindspeed_fx
from mindspeed_fx import arguments
from mindspeed_fx.ascend import ship, stub
from mindspeed_fx.ascend.kernels import compile_kernels
from mindspeed_fx.ascend.report import CrossReport
from mindspeed_fx.ascend.toolchain import ToolchainError
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options

_HINTS = dict.fromkeys(
    ("DataDependentOutputException", "UnsupportedFakeTensorException", "GuardOnDataDependentSymNode"),
    " (the model reads a value of a tensor, which has none over there: keep such numbers as Python numbers)",
)


class CrossError(RuntimeError):
    """Compiling failed in the other process. The message has its error and the line of the model where it arose;
    ``frames`` are the model's own lines, ``details`` the whole traceback and output."""

    def __init__(self, message: str, details: str = "", frames: str = ""):
        super().__init__(message)
        self.details, self.frames = details, frames


def cross_compile(
    model: Callable | str,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    soc: str = "Ascend910B2",
    options: dict[str, Any] | None = None,
    baseline: bool = True,
    kernels: bool = True,
    toolchain: str | os.PathLike | None = None,
    timeout: float | None = None,
) -> CrossReport:
    """Compile ``model`` for an Ascend SoC: trace a forward and, if an output needs a gradient, a backward on fake NPU
    tensors.

    Args:
        model: module or function, which is pickled without any tensor's values; or "SCRIPT.py:FUNCTION", whose function
            returns (model, args) or (model, args, kwargs) and is called in the other process, under the meta device.
        args, kwargs: inputs; tensors of any device, of which only shape, strides and type matter.
        soc: one of :data:`mindspeed_fx.ascend.stub.SOCS`.
        options: as for ``torch.compile(model, backend="mindspeed", options=...)``; the target is npu, the codegen
            eager.
        baseline: also trace without any pass, to compare with.
        kernels: also compile the Triton kernels of the operators that were found, with the tiles that suit the SoC.
        toolchain: directory of the tool chain; see :mod:`mindspeed_fx.ascend.toolchain`.
        timeout: seconds after which to give up.

    Raises:
        ToolchainError: the tool chain is not installed, cannot be used, or CANN is real here.
        ShipError: the model cannot be sent; it says how to define it so that it can.
        OptionError: a bad option.
        CrossError: the model or the compiler failed over there.
    """
    if not isinstance(model, str):
        arguments.check_callable("cross_compile", "model", model)
    arguments.check_call("cross_compile", args, kwargs)
    arguments.check_word("cross_compile", "soc", soc, stub.SOCS)
    arguments.check_options("cross_compile", options)
    arguments.check_bool("cross_compile", "baseline", baseline)
    arguments.check_bool("cross_compile", "kernels", kernels)
    arguments.check_path("cross_compile", "toolchain", toolchain)
    arguments.check_seconds("cross_compile", "timeout", timeout)
    arg = _options(options, soc)
    source = (
        model
        if isinstance(model, str)
        else f"{type(model).__module__}.{type(model).__qualname__}"
        if not hasattr(model, "__qualname__")
        else f"{model.__module__}.{model.__qualname__}"
    )
    script = ship.split(model) if isinstance(model, str) else None
    if not script:
        ship.check_inputs("cross_compile", model, args, kwargs or {})
    if script and (len(args) or kwargs):
        raise ship.ShipError(f"{model} makes its own inputs; args and kwargs cannot be given")
    data = b"" if script else ship.pack(model, tuple(args), dict(kwargs or {}))
    request = {
        "script": script,
        "model": data,
        "main": _main_module() if b"__main__" in data else None,
        "options": arg,
        "baseline": baseline,
        "hardware": arg["hardware"],
        "path": sys.path,
        "argv": sys.argv[:1],
    }
    start = time.perf_counter()
    answer: dict[str, Any] = _ask(request, stub.environment(soc, 1, toolchain), timeout)
    compiled = (
        _kernels(answer.pop("triton_calls"), soc, toolchain)
        if kernels
        else {"compiler": "", "calls": [], "problem": "not asked for"}
    )
    return CrossReport(
        {"soc": soc, "model": source, **answer, "kernels": compiled, "wall_seconds": time.perf_counter() - start}
    )


def _options(options: dict[str, Any] | None, soc: str) -> dict[str, Any]:
    """The options of the other process: target npu, codegen eager, the hardware of ``soc`` unless one is named."""
    arguments = {
        **Options.parse(options).as_dict(),
        **{k: v for k, v in (options or {}).items() if k in ("target", "codegen")},
    }
    for name, only in (("target", "npu"), ("codegen", "eager")):
        if arguments[name] not in ("auto", only):
            raise OptionError(f'option "{name}" is {arguments[name]!r}; cross-compiling knows only "{only}"')
        arguments[name] = only
    arguments["hardware"] = arguments["hardware"] or soc
    return arguments


def _kernels(calls: list[dict[str, Any]], soc: str, directory: str | os.PathLike | None) -> dict[str, Any]:
    """What became of the Triton kernels; the reason when triton-ascend is not installed, for graphs are worth having
    without.
    """
    try:
        result = compile_kernels(calls, soc, directory)
        rows = [{**row, "in_graph": call["in_graph"]} for row, call in zip(result["calls"], calls, strict=True)]
        return {**result, "calls": rows, "problem": ""}
    except ToolchainError as e:
        return {"compiler": "", "calls": [], "problem": str(e)}


def _main_module() -> dict[str, Any]:
    data = multiprocessing.spawn.get_preparation_data("cross")
    main = {k: v for k, v in data.items() if k.startswith("init_main_from")}
    if not main:
        raise ship.ShipError(
            "the model's classes are defined in an interactive session, which another process cannot import; put them "
            'into a file, or give "SCRIPT.py:FUNCTION"'
        )
    return main


def _ask(request: dict[str, Any], environment: dict[str, str], timeout: float | None) -> dict[str, Any]:
    package = str(pathlib.Path(mindspeed_fx.__file__).parents[1])
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], package])}
    with tempfile.TemporaryDirectory(prefix="mindspeed_fx-") as folder:
        asked, answered = pathlib.Path(folder, "request"), pathlib.Path(folder, "result")
        asked.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", "mindspeed_fx.ascend.worker", str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise CrossError(f"not done within {timeout} s") from None
        output = (done.stdout + done.stderr)[-8000:]
        if not answered.is_file():
            why = (
                f"was ended by signal {-done.returncode} (out of memory?)"
                if done.returncode < 0
                else f"ended with status {done.returncode}"
            )
            raise CrossError(f"the process that has torch_npu {why} before it answered", output)
        answer = json.loads(answered.read_text())
    if error := answer.get("error"):
        for kind in (ship.ShipError, OptionError):
            if error["type"] == kind.__name__:
                raise kind(error["message"])
        where = f" ({error['where']})" * bool(error["where"])
        raise CrossError(
            f"{error['type']}: {error['message']}{_HINTS.get(error['type'], '')}{where}",
            error["traceback"] + "\n" + output,
            error["frames"] or error["traceback"],
        )
    return answer
