"""The same program in two processes that differ in hash seed, threads and names of temporary files: the same graphs
after every pass, the same saved values and plans, the same bits."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def told(kind: str, seed: int, threads: int, folder: pathlib.Path) -> list[str]:
    """What :mod:`tests.surroundings.determinism_worker` prints in a process of its own."""
    surroundings = {"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(threads), "TMPDIR": str(folder)}
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.surroundings.determinism_worker", kind],
        env=os.environ | surroundings | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("budget", 60),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("experts", 60), ("ranks", 60), ("search", 10))),
    ],
)
def test_hash_seed_threads_and_folders_change_nothing(kind, least, tmp_path):
    first = told(kind, 1, 1, tmp_path / "one")
    assert len(first) >= least
    assert told(kind, 7, 2, tmp_path / "another") == first
