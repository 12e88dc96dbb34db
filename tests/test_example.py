"""The main job, small: learns, resumes bitwise after a kill, and gives the same losses data- and tensor-parallel."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = """
    --layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 64 --seq 32 --batch 2 --steps 12 --warmup 2
    --eval-every 6 --eval-batches 2 --save-every 3 --peak-tflops 0.1 --codegen eager
""".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    return str(path)


def command(out, text, *extra, ranks=1):
    launcher = (
        [sys.executable]
        if ranks == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    )
    return [*launcher, str(EXAMPLES / "pretrain_gpt.py"), *SMALL, "--data", text, "--out", str(out), *extra]


def run(*args, **kwargs):
    done = subprocess.run(
        command(*args, **kwargs), capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(out):
    return json.loads((Path(out) / "log.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, run(out, text)


def test_reports_what_a_user_looks_for(whole):
    out, printed = whole
    for words in (
        "unigram entropy",
        "tokens/s",
        "MFU",
        "validation loss",
        "first step (with compilation)",
        "parameters, backend mindspeed",
    ):
        assert words in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    log = losses(out)
    assert [r["step"] for r in log] == list(range(1, 13)) and log[-1]["validation"] < log[5]["validation"] < math.log(
        256
    )


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_uninterrupted(whole, tmp_path, text):
    victim = subprocess.Popen(
        command(tmp_path / "run", text),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    checkpoint = tmp_path / "run" / "checkpoint.tp0of1.pt"
    deadline = time.time() + 120
    while not checkpoint.exists() and time.time() < deadline:
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    killed_at = torch.load(checkpoint)["step"]
    run(tmp_path / "run", text, "--resume")
    a, b = torch.load(whole[0] / "checkpoint.tp0of1.pt"), torch.load(checkpoint)
    assert 3 <= killed_at <= 12 and a["step"] == b["step"] == 12
    assert a["model"].keys() == b["model"].keys() and all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    assert a["log"] == b["log"]


def test_a_checkpoint_of_another_run_is_refused_by_name(whole, tmp_path, text):
    (tmp_path / "other.txt").write_text("some other text. " * 9000)
    extra = (
        "--resume",
        "--hidden",
        "64",
        "--weight-decay",
        "0.2",
        "--clip",
        "2",
        "--data",
        str(tmp_path / "other.txt"),
    )
    done = subprocess.run(command(whole[0], text, *extra), capture_output=True, text=True)
    assert done.returncode == 1 and "was written with" in done.stderr and "Traceback" not in done.stderr
    for words in ("--hidden 32, not 64", "--weight-decay 0.1, not 0.2", "--clip 1.0, not 2.0", "--data text "):
        assert words in done.stderr
    assert "--layers" not in done.stderr
    stored = torch.load(whole[0] / "checkpoint.tp0of1.pt")["settings"]
    assert stored["sequence_parallel"] is False and stored["data_parallel_ranks"] == 1


@pytest.mark.slow  # megatron/test_two_ranks.py has both in one process group, operator by operator
@pytest.mark.parametrize("extra", [("--tp", "2"), ("--tp", "2", "--sequence-parallel")])
def test_tensor_parallel_gives_the_same_losses(whole, tmp_path, text, extra):
    run(tmp_path / "run", text, *extra, ranks=2)
    for a, b in zip(losses(whole[0]), losses(tmp_path / "run"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4) and b["norm"] == pytest.approx(a["norm"], rel=1e-3)


@pytest.mark.slow
def test_data_parallel_runs(tmp_path, text):
    assert "2 data-parallel ranks" in run(tmp_path / "run", text, ranks=2)


@pytest.mark.slow
def test_every_backend_gives_the_same_losses(whole, tmp_path, text):
    arguments = list(command(tmp_path / "eager", text, "--backend", "eager"))
    arguments = [a for i, a in enumerate(arguments) if a != "--codegen" and arguments[i - 1] != "--codegen"]
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    for a, b in zip(losses(whole[0]), losses(tmp_path / "eager"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


@pytest.mark.slow
def test_too_little_text_is_a_clear_error(tmp_path):
    (tmp_path / "tiny.txt").write_text("too short")
    done = subprocess.run(command(tmp_path / "run", str(tmp_path / "tiny.txt")), capture_output=True, text=True)
    assert done.returncode == 1 and "fewer than a sequence of 32" in done.stderr and "Traceback" not in done.stderr
