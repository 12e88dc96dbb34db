"""The process that has torch_npu: reads a request, compiles on fake ``npu:0`` tensors, writes a result as JSON.

    python -m mindspeed_fx.ascend.worker REQUEST RESULT

Started by :mod:`mindspeed_fx.ascend.compile` alone, with the tool chain on its path.
"""

from __future__ import annotations

import json
import multiprocessing.spawn
import pathlib
import pickle
import sys
import time
from typing import Any

from mindspeed_fx.ascend.blame import describe_error


def main(request: str, result: str) -> None:
    """Answer one request; errors are part of the answer."""
    try:
        answer = run(pickle.loads(pathlib.Path(request).read_bytes()))
    except BaseException as e:  # whatever happens in the user's model belongs to the answer
        answer = {"error": describe_error(e)}
    pathlib.Path(result).write_text(json.dumps(answer, default=str))


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The result for one request of :func:`mindspeed_fx.ascend.compile.cross_compile`."""
    sys.path[:] += [p for p in request["path"] if p not in sys.path]
    sys.argv[:] = request["argv"]
    import torch
    import torch_npu

    from mindspeed_fx.ascend.describe import describe
    from mindspeed_fx.ascend.npu_graphs import trace_on_npu
    from mindspeed_fx.options import Options

    seconds, start = {}, time.perf_counter()
    model, args, kwargs = _model(request)
    seconds["build"] = time.perf_counter() - start
    options = Options.parse(request["options"], environ={})
    start = time.perf_counter()
    traced = trace_on_npu(model, args, kwargs, options)
    seconds["trace"] = time.perf_counter() - start
    result = describe(traced, request["hardware"])
    if request["baseline"]:
        start = time.perf_counter()
        plain = Options.parse(
            {**request["options"], "level": 0, "enable": [], "strict": False, "dump": None}, environ={}
        )
        torch._dynamo.reset()
        result["unfused"] = describe(trace_on_npu(model, args, kwargs, plain), request["hardware"], code=False)
        del result["unfused"]["triton_calls"]
        seconds["unfused"] = time.perf_counter() - start
    # Not getrusage: Linux keeps what the parent had when this process was started.
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return {
        **result,
        "options": options.as_dict(),
        "seconds": seconds,
        "peak_memory": peak,
        "versions": {"torch": torch.__version__, "torch_npu": torch_npu.__version__},
    }


def _model(request: dict[str, Any]) -> tuple[Any, tuple, dict]:
    from mindspeed_fx.ascend import ship

    if request["script"]:
        return ship.build(*request["script"])
    if request[
        "main"
    ]:  # classes of the user's script: it is imported as multiprocessing does, under another name than __main__
        multiprocessing.spawn.prepare(request["main"])
    return ship.unpack(request["model"])


if __name__ == "__main__":
    main(*sys.argv[1:])
