"""What was run, line by line as it was run, so that nothing is lost when a kernel ends the process or never ends; and
the one file that is made of it.

Lines of the journal are JSON: ``{"about": ...}`` first, then ``{"start": key}`` before each check and ``{"result":
...}`` after it. A check that was started and has no result ended its process.
"""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

from mindspeed_fx import private_files

SCHEMA = 1
"""Version of the file: raised when a reader of the last one would misread it."""
STATES = ("passed", "failed", "not run")


class Journal:
    """The journal beside the file ``out``.

    Attributes:
        about: what the checks run on; results of a journal about something else are not taken over.
        results: key -> row, in the order in which they came.
    """

    def __init__(self, out: str, about: dict[str, Any], fresh: bool = False):
        self.out, self.about = pathlib.Path(out), about
        self.path = self.out.with_name(self.out.name + ".journal")
        self.results: dict[str, dict[str, Any]] = {}
        self.pending: str | None = None
        earlier = [] if fresh else self._read()
        if not earlier or earlier[0].get("about") != about:
            self.path.write_text(json.dumps({"about": about}) + "\n")
            return
        for line in earlier[1:]:
            self._take(line)
        if self.pending is not None:
            self.finish(self.pending, "failed", problem="ended the process that ran it")

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        lines = []
        for text in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # the last line of a process that was ended while it wrote
                break
        return lines

    def _take(self, line: dict[str, Any]) -> None:
        if "start" in line:
            self.pending = line["start"]
        elif "result" in line:
            self.results[line["result"]["key"]] = line["result"]
            self.pending = None

    def start(self, key: str) -> None:
        """A check begins."""
        self.pending = key
        self._write({"start": key})

    def finish(self, key: str, state: str, **row: Any) -> None:
        """A check has ended; ``row`` is what its line of the file has besides key and state."""
        result = {"key": key, **_names(key), "state": state, **row}
        self._take({"result": result})
        self._write({"result": result})

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self, missing: list[str]) -> dict[str, Any]:
        """Write the file; the journal goes when nothing is ``missing``, keys of checks that had no time."""
        rows = [*self.results.values(), *(_without_time(k) for k in missing)]
        counts = {state: sum(r["state"] == state for r in rows) for state in STATES}
        content = {
            "schema": SCHEMA,
            "finished": not missing,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.about,
            "counts": counts,
            "results": rows,
        }
        private_files.write_whole(self.out, json.dumps(content, indent=1, default=str))
        if not missing:
            self.path.unlink(missing_ok=True)
        return content


def _names(key: str) -> dict[str, str]:
    """What a key is made of."""
    kind, _, rest = key.partition("/")
    name, _, dtype = rest.rpartition("/")
    return {"kind": kind, "name": name, "dtype": dtype} if name else {"kind": kind, "name": rest, "dtype": "all"}


def _without_time(key: str) -> dict[str, str]:
    return {"key": key, **_names(key), "state": "not run", "reason": "no time"}
