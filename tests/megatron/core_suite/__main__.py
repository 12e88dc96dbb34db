"""``python -m tests.megatron.core_suite CHECKOUT [FILES ...]``: see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.megatron.core_suite import page

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.megatron.core_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="Megatron-LM at core_v0.16.1")
    parser.add_argument("files", nargs="*", help="below tests/unit_tests; folders too")
    parser.add_argument("--world", type=int, default=1, help="ranks")
    parser.add_argument("--compile", action="store_true", help="compile models and layers")
    parser.add_argument("--seconds", type=int, default=600, help="for a file")
    parser.add_argument("--test-seconds", type=int, default=120, help="for a test")
    parser.add_argument("--folder", type=Path, help="for records; a new one by default")
    parser.add_argument("--page", type=Path, help="write the page of the records in --folder, and of --beside")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="folders of records of other runs")
    parser.add_argument("-k", dest="only", default="", help="tests, as of pytest")
    options = parser.parse_args()
    folder = run(options) if options.files else options.folder
    if options.page:
        options.page.write_text(page.write([folder, *options.beside], time.strftime("%Y-%m-%d")))


def run(options: argparse.Namespace) -> Path:
    """Run the files; returns the folder of their records."""
    tests = options.checkout.resolve() / "tests" / "unit_tests"
    files = [str(p.relative_to(tests.parents[1])) for name in options.files for p in files_of(tests / name)]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="core_suite_"))
    folder.mkdir(parents=True, exist_ok=True)
    request = vars(options) | {"checkout": options.checkout.resolve(), "files": files, "folder": folder}
    (folder / "request.json").write_text(json.dumps(request, default=str))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", str(HERE / "session.py"), str(folder / "request.json")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{path}"}, check=True)
    print(folder)
    return folder


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


if __name__ == "__main__":
    main()
