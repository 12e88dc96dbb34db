"""The process that has triton-ascend: compiles the Triton kernels of operators for a SoC, choosing their tiles.

    python -m mindspeed_fx.ascend.kernel_worker FOLDER REQUEST RESULT

FOLDER is triton-ascend's, which is also on the path. REQUEST: {"soc", "calls": [{"operator", "arguments"}]}, tensors as
{"shape", "stride", "dtype"}. Started by :mod:`mindspeed_fx.ascend.kernels` alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pathlib
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from mindspeed_fx.ascend import bishengir, frontend
from mindspeed_fx.kernels import REGISTRY, triton
from mindspeed_fx.kernels.triton import generate, launch, tiles
from mindspeed_fx.private_files import write_whole


class Compiler:
    """One SoC's compiler, with a cache beside the tool chain."""

    def __init__(self, folder: str, soc: str):
        self.program, self.soc = bishengir.compiler(folder), soc
        self.cache = pathlib.Path(folder, "compiled")
        with contextlib.suppress(OSError):
            self.cache.mkdir(exist_ok=True)
        sources = [pathlib.Path(m.__file__).read_bytes() for m in (bishengir, frontend)]
        self.identity = [bishengir.version(self.program), soc, hashlib.sha256(b"".join(sources)).hexdigest()]

    def call(self, operator: str, arguments: list[Any]) -> dict[str, Any]:
        """The kernels of one call of ``mindspeed::<operator>``: for each launch the best tile, or why there is none."""
        run = (
            triton.load(triton.PARTS[operator])
            if operator in triton.PARTS
            else REGISTRY[getattr(torch.ops.mindspeed, f"{operator}_triton").default].reference
        )
        problems = []
        module, variants = tiles.VARIANTS.get(operator.removesuffix("_backward"), ("", ({},)))
        for settings in variants:
            try:
                results = [self.launch(*result) for result in launches(run, arguments, module, settings)]
            except (NotImplementedError, AssertionError) as e:
                return {
                    "operator": operator,
                    "kernels": [],
                    "problem": str(e) or "the launcher does not take these arguments",
                }
            if all("problem" not in f for f in results):
                return {"operator": operator, "kernels": results, "problem": ""}
            problems += [f"{f['kernel']}: {f['problem']}" for f in results if "problem" in f]
        return {"operator": operator, "kernels": [], "problem": "; ".join(problems)}

    def region(self, call: dict[str, Any]) -> dict[str, Any]:
        """The kernel of a region of a graph."""
        inputs, outputs = ([tensor(t) for t in call[k]] for k in ("inputs", "outputs"))
        (result,) = launches(generate.run, [call["source"], tuple(call["shape"]), inputs, outputs])
        hit = self.launch(*result)
        problem = hit.get("problem", "")
        return {"operator": f"region of {call['what']}", "kernels": [] if problem else [hit], "problem": problem}

    def launch(self, kernel: Any, args: tuple, constants: dict[str, Any]) -> dict[str, Any]:
        """The best tile of one launch; "problem" instead when none compiles."""
        wanted = tiles.candidates(constants)
        rows = self.compile(kernel, args, [{**constants, **tile} for tile in wanted])
        tried = [
            {**row, "tile": tile, "cycles": tiles.cycles(row, {**constants, **tile})} for row, tile in zip(rows, wanted)
        ]
        best = tiles.best(tried)
        if best is None:
            return {"kernel": kernel.__name__, "problem": f"no tile of {len(tried)} compiles: {tried[-1]['message']}"}
        others = [{k: t[k] for k in ("tile", "outcome", "message")} for t in tried if t is not best]
        return {"kernel": kernel.__name__, **best, "others": others}

    def compile(self, kernel: Any, args: tuple, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One row for each choice of constants; bishengir-compile runs for several at once."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [
                f.result()
                for f in [
                    self._start(pool, kernel, *frontend.signature(kernel, args, constants)) for constants in choices
                ]
            ]

    def _start(self, pool: ThreadPoolExecutor, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Future:
        parts = (self.identity, kernel.__name__, kernel.cache_key, sorted(types.items()), sorted(constants.items()))
        stored = self.cache / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.json"
        if (row := _read_row(stored)) is not None:
            return pool.submit(lambda: row)
        try:
            text, cores = frontend.lower(kernel, types, constants, self.soc)
        except frontend.FrontendError as e:
            row = {
                "outcome": bishengir.ERROR,
                "message": str(e),
                "on_chip": {},
                "work": {},
                "dynamic": 0,
                "scalar_loops": 0,
                "cores": "",
            }
            return pool.submit(lambda: row)
        return pool.submit(self._finish, stored, text, cores)

    def _finish(self, stored: pathlib.Path, text: str, cores: str) -> dict[str, Any]:
        row = {**bishengir.compile_linalg(self.program, text, self.soc), "cores": cores}
        with contextlib.suppress(OSError):  # a full disk, or a tool chain that is read alone: compiled anew next time
            write_whole(stored, json.dumps(row), 0o644)
        return row


def _read_row(stored: pathlib.Path) -> dict[str, Any] | None:
    """What was kept of a kernel; None where there is nothing, or not the whole of it."""
    try:
        row = json.loads(stored.read_text())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and {"outcome", "message", "on_chip", "work", "cores"} <= row.keys() else None


def launches(
    run: Any, arguments: list[Any], module: str = "", settings: dict[str, int] | None = None
) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """(kernel, arguments, constants) of each launch that a call makes, with thresholds of a launcher's file set;
    nothing is started.
    """
    results: list = []
    where = vars(importlib.import_module(f"mindspeed_fx.kernels.triton.{module}")) if settings else {}
    before = {name: where[name] for name in settings or ()}
    where.update(settings or {})
    try:
        with launch.launching(
            lambda kernel, grid, args, num_warps, constants: results.append((kernel, args, constants)), for_npu=True
        ):
            run(*arguments)
    finally:
        where.update(before)
    return results


def tensor(value: Any) -> Any:
    """An argument of a request as a call has it: tensors on the meta device."""
    if isinstance(value, dict):
        return torch.empty_strided(value["shape"], value["stride"], dtype=getattr(torch, value["dtype"]), device="meta")
    return value


def main(folder: str, request: str, result: str) -> None:
    asked = json.loads(pathlib.Path(request).read_text())
    output = Compiler(folder, asked["soc"])
    rows = [
        output.region(c) if "source" in c else output.call(c["operator"], [tensor(a) for a in c["arguments"]])
        for c in asked["calls"]
    ]
    pathlib.Path(result).write_text(json.dumps({"compiler": bishengir.version(output.program), "calls": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
