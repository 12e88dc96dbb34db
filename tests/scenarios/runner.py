"""Runs scenarios, each with each backend in a process of its own, and keeps what came of them in a folder: what is
there is not run again, so that a run that was broken off goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests import forks

PACKAGES = Path("build", "scenarios")
"""Libraries that the project does not depend on; ``make scenarios`` puts them there."""


class Runner:
    """Forks of one process that has imported what they share."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        self.server: forks.Server | None = None
        self.module = ""
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, module: str, backend: str) -> dict[str, Any]:
        """What became of a scenario with a backend: ``status`` is ok, raised, died or late."""
        record = self.record(name, backend)
        if record is None:
            if self.server is None or module != self.module:
                self.close()
                os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.folder.resolve() / "cache"))
                os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
                self.server = forks.Server(f"from tests.scenarios import runner; runner.serve({module!r})")
                self.module = module
            path = str(self.path(name, backend))
            try:
                self.server.ask({"name": name, "backend": backend, "path": path, "limit": self.limit})
            except (RuntimeError, BrokenPipeError):  # its libraries do not import
                self.server = None
                Path(f"{path}.json").write_text(json.dumps({"status": "died", "error": f"{module} does not import"}))
            record = self.record(name, backend)
            assert record is not None
        return record

    def path(self, name: str, backend: str) -> Path:
        return self.folder / f"{name.replace('/', '.')}.{backend}"

    def record(self, name: str, backend: str) -> dict[str, Any] | None:
        path = self.path(name, backend)
        if not Path(f"{path}.json").exists():
            return None
        record = json.loads(Path(f"{path}.json").read_text())
        return record if record["status"] != "ok" or Path(f"{path}.pt").exists() else None

    def values(self, name: str, backend: str) -> dict[str, Any]:
        import torch

        return torch.load(f"{self.path(name, backend)}.pt", weights_only=True)

    def forget(self, name: str, backend: str) -> None:
        for suffix in ("json", "pt", "txt"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{self.path(name, backend)}.{suffix}")

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


def serve(module: str) -> None:
    """Answer requests until standard input ends."""

    def prepare() -> None:
        add_packages()
        sys.modules[module] = __import__(module, fromlist=["*"])
        getattr(sys.modules[module], "preload", lambda: None)()

    forks.answer(_handle, prepare)


def add_packages() -> None:
    """Put the libraries at the end of the path. PyPI's torchvision is built for another torch: its models work, once
    two operators that its compiled half would define are known by name."""
    import torch

    if str(PACKAGES.resolve()) not in sys.path:
        sys.path.append(str(PACKAGES.resolve()))
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []


def _handle(request: dict[str, Any]) -> str:
    path = request["path"]
    pid = forks.start(lambda: _run(request), f"{path}.txt")
    started = time.monotonic()
    codes, late = forks.wait([pid], request["limit"], grace=1)
    if not Path(f"{path}.json").exists():
        status = "late" if late else "died"
        record = {"status": status, "error": f"exit status {codes[0]}", "seconds": time.monotonic() - started}
        Path(f"{path}.json").write_text(json.dumps(record))
    return "done"


def _shorten(text: str) -> str:
    return text if len(text) < 4000 else f"{text[:200]} ... {text[-3500:]}"


def _run(request: dict[str, Any]) -> int:
    import torch

    from tests.scenarios import table

    scenario, label, path = table.SCENARIOS[request["name"]], request["backend"], request["path"]
    started = time.monotonic()
    record: dict[str, Any] = {"status": "ok"}
    try:
        torch.manual_seed(0)
        values = table.flatten(scenario.function(table.Run(label), *scenario.args))
        torch.save(values, f"{path}.pt")
        record["values"] = len(values)
    except BaseException as error:
        record |= {
            "status": "raised",
            "error": _shorten(f"{type(error).__name__}: {error}"),
            "trace": traceback.format_exc(),
        }
    counters = torch._dynamo.utils.counters
    record |= {
        "seconds": round(time.monotonic() - started, 2),
        "processor": round(sum(os.times()[:4]), 2),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }
    Path(f"{path}.json.part").write_text(json.dumps(record))
    os.replace(f"{path}.json.part", f"{path}.json")
    return 0
