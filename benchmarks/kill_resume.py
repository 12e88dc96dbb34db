"""Kill -9 of a random rank at a random moment, under torchrun's elastic agent: does the job resume by itself, and end
with the bits of a run that nobody disturbed?

    python -m benchmarks.kill_resume --count 20 --jobs 5

An undisturbed run of examples/train_hf.py on two processes comes first (zero2, dropout, accumulation, asynchronous
checkpoints every third step); then jobs of the same command, each killed several times: a rank by chance, at a moment
by chance between its start and as long after as the fastest undisturbed run took. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed.checkpoint as dcp

ROOT = pathlib.Path(__file__).parents[1]
RANKS, STEPS = 2, 120
RUN = f"""
    --model gpt_neox --layers 1 --hidden 32 --heads 4 --ffn 64 --seq-length 32 --batch-size 4 --dropout 0.1
    --accumulate 2 --plan zero2 --steps {STEPS} --save-every 3 --eval-batches 0 --sample-length 0 --peak-tflops 0.1
    --codegen eager
""".split()


@dataclasses.dataclass
class Kill:
    """What one kill met.

    Args:
        rank: that was killed.
        seconds: after the start of its process.
        stood: the last whole checkpoint then.
        writing: whether another was being written then, or when the kill before came.
    """

    rank: int
    seconds: float
    stood: int
    writing: bool


def workers(agent: int) -> dict[int, int]:
    """rank -> process id of the children of torchrun's agent."""
    found = {}
    for task in pathlib.Path(f"/proc/{agent}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            try:
                environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {int(e[5:]): pid for e in environ if e.startswith(b"RANK=")}
    return found


def last_checkpoint(folder: pathlib.Path) -> int:
    """Its step; 0 where there is none."""
    return max((int(p.name[5:]) for p in folder.glob("step_*") if not p.suffix), default=0)


def start(folder: pathlib.Path, text: pathlib.Path, restarts: int) -> subprocess.Popen:
    """torchrun with the example, in a group of processes of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
                f"--max-restarts={restarts}", "--monitor-interval=0.1"]  # fmt: skip
    words = [*torchrun, str(ROOT / "examples" / "train_hf.py"), *RUN, "--data", str(text), "--save", str(folder)]
    out = open(folder.with_suffix(".log"), "w")
    return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=dict(os.environ))


def disturb(job: subprocess.Popen, folder: pathlib.Path, kills: int, limit: float, chance: random.Random) -> list[Kill]:
    """Kill ranks of ``job`` until it ends or ``kills`` are done; then wait for its end."""
    done: list[Kill] = []
    try:
        before: set[int] = set()
        while len(done) < kills and job.poll() is None:
            alive = workers(job.pid)
            if len(alive) < RANKS or before & set(alive.values()):
                time.sleep(0.02)
                continue
            rank, moment, begun = chance.randrange(RANKS), chance.uniform(0, limit), time.monotonic()
            while job.poll() is None and time.monotonic() - begun < moment:
                time.sleep(0.01)
            if job.poll() is not None:
                break
            before = set(alive.values())
            writing = bool(list(folder.glob("step_*.partial")))
            done.append(Kill(rank, time.monotonic() - begun, last_checkpoint(folder), writing))
            try:
                os.kill(alive[rank], signal.SIGKILL)
            except ProcessLookupError:  # it had just ended
                done.pop()
        job.wait(600)
    finally:
        if job.poll() is None:
            for pid in (job.pid, *workers(job.pid).values()):  # which have sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return done


def read_tensors(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    held = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in held.items() if hasattr(m, "size")}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def differing(folder: pathlib.Path, expected: pathlib.Path) -> list[str]:
    """Tensors of the last checkpoints that have not the same bits: weights, the optimizer's states, generators."""
    found, right = (read_tensors(f / f"step_{STEPS:07d}") for f in (folder, expected))
    both = found.keys() & right.keys()
    return sorted({*(found.keys() ^ right.keys()), *(n for n in both if not _same(found[n], right[n]))})


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def measure(count: int, jobs: int, seed: int) -> int:
    """Prints what happened; returns how many jobs did not end with the same bits."""
    chance, wrong, number, kills = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as root:
        text, whole = pathlib.Path(root, "text"), pathlib.Path(root, "whole")
        text.write_text("\n\n\n".join(f"def fox_{i}():\n    return 'over the lazy dog' * {i % 7}" for i in range(900)))
        begun = time.monotonic()
        job = start(whole, text, 0)
        if job.wait(600):
            raise SystemExit(whole.with_suffix(".log").read_text()[-4000:])
        limit = time.monotonic() - begun
        print(
            f"undisturbed: {STEPS} steps on {RANKS} processes in {limit:.0f} s; torch {torch.__version__}", flush=True
        )
        while kills < count:
            number += 1
            wanted = min(-(-count // jobs), count - kills)
            folder = pathlib.Path(root, f"job{number}")
            job = start(folder, text, wanted)
            begun = time.monotonic()
            done = disturb(job, folder, wanted, limit, chance)
            limit = limit if done else min(limit, time.monotonic() - begun)
            log = folder.with_suffix(".log").read_text()
            came = [int(n) for n in re.findall(r"goes on from step (\d+)", log)]
            for kill in done:
                kills += 1
                meant = ", while another was being written" if kill.writing else ""
                print(f"kill {kills}: rank {kill.rank}, {kill.seconds:.1f} s after its start, last checkpoint of step "
                      f"{kill.stood}{meant}", flush=True)  # fmt: skip
            others = ["no end"] if job.returncode else differing(folder, whole)
            wrong += bool(others)
            verdict = "every tensor has the bits of the undisturbed run" if not others else f"differs: {others[:4]}"
            print(
                f"job {number}: {len(done)} kills, went on from steps {came}, exit status {job.returncode}: {verdict}",
                flush=True,
            )
            if job.returncode:
                print(log[-3000:])
    print(f"{kills} kills, {number} jobs, {wrong} of them not ended with the same bits")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="kills; default: 20")
    parser.add_argument("--jobs", type=int, default=5, help="that they are spread over; default: 5")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    raise SystemExit(1 if measure(args.count, args.jobs, args.seed) else 0)


if __name__ == "__main__":
    main()
