"""The main job, small: learns, resumes bitwise, gives the losses of eager Megatron-core in every parallelism, and says
what does not go together in one line.
"""

import math
import shutil
from pathlib import Path

import pytest

from tests.example_runs import Run, Server, read_log

pytest.importorskip("megatron.core", reason="megatron-core is an optional dependency")
SMALL = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --seq-length 32
    --micro-batch-size 1 --global-batch-size 4 --train-iters 8 --lr-warmup-iters 2 --eval-interval 4 --eval-iters 2
    --save-interval 4 --peak-tflops 0.1
""".split()
COMPILED, EAGER = ["--codegen", "eager"], ["--backend", "eager"]
LATEST = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    return str(path)


@pytest.fixture(scope="module")
def train(server, text):
    """``train(out, words)``: a run that ends well."""

    def run(out: Path, words: str | list[str] = "", ranks: int = 1, backend: list[str] = COMPILED) -> Run:
        words = words.split() if isinstance(words, str) else words
        done = server.run([*SMALL, "--data", text, "--save", str(out), *backend, *words], ranks)
        assert not any(done.codes), "\n".join(done.errors)[-4000:]
        return done

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(out).output


def check_close(out, expected, tolerance):
    """Losses, norms and rates of every step of ``out``, and its validation, are those of ``expected``."""
    rows, right = read_log(out), read_log(expected)
    assert len(rows) == len(right)
    for row, wanted in zip(rows, right):
        assert row == {k: pytest.approx(wanted[k], rel=tolerance) for k in {*row, "loss", "norm"}}, row["step"]


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
    log = read_log(out)
    assert [r["step"] for r in log] == list(range(1, 9))
    assert log[-1]["validation"] < log[3]["validation"] < math.log(256)
    assert [round(r["lr"] / 1.5e-3, 3) for r in log] == [0.0, 0.5, 1.0, 0.94, 0.775, 0.55, 0.325, 0.16]
    assert [p.name for p in out.glob("iter_*")] == ["iter_0000008"] and (out / LATEST).read_text() == "8"


def test_two_ranks_with_overlapped_buckets_stop_and_go_on_as_one_rank_without_a_stop(whole, tmp_path, train):
    """The distributed optimizer, collectives inside the graphs, accumulation, and a checkpoint of several buckets."""
    out, words = tmp_path / "run", "--eval-iters 0 --ddp-bucket-size 5000"
    assert "2 data-parallel ranks" in train(out, f"{words} --exit-interval 4", ranks=2).output
    assert [r["step"] for r in read_log(out)] == [1, 2, 3, 4]
    train(out, f"{words} --load {out}", backend=EAGER)
    check_close(out, whole[0], 1e-5)


def test_a_checkpoint_of_another_run_is_refused_by_name(whole, tmp_path, server, text):
    (tmp_path / "other.txt").write_text("some other text. " * 9000)
    words = "--hidden-size 64 --weight-decay 0.2 --clip-grad 2".split()
    words += ["--load", str(whole[0]), "--data", str(tmp_path / "other.txt"), "--save", str(tmp_path / "run")]
    done = server.run([*SMALL, *words])
    assert done.codes == [1] and "was written with" in done.errors[0] and "Traceback" not in done.errors[0]
    for told in ("--hidden-size 32, not 64", "--weight-decay 0.1, not 0.2", "--clip-grad 1.0, not 2.0", "--data text "):
        assert told in done.errors[0]
    assert "--num-layers" not in done.errors[0]


@pytest.mark.parametrize(
    "words, ranks, error",
    [
        ("--load /nonexistent", 1, "--load: there is no checkpoint in /nonexistent"),
        ("--ffn-hidden-size 65 --tensor-model-parallel-size 2", 2, "65 is not divisible by 2"),
    ],
)
def test_what_is_found_while_the_model_is_built_is_one_line(tmp_path, server, text, words, ranks, error):
    done = server.run([*SMALL, "--data", text, "--save", str(tmp_path), *words.split()], ranks)
    (line,) = [line for line in done.errors[0].splitlines() if line.startswith("error: ")]
    assert done.codes == [1] * ranks and error in line and "Traceback" not in "".join(done.errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, ranks",
    [("", 1), ("--bf16", 2), ("--hidden-dropout 0.1 --attention-dropout 0.1", 2), ("--no-use-distributed-optimizer", 2),
     ("--num-experts 4 --expert-model-parallel-size 2", 2), ("--num-layers 2 --pipeline-model-parallel-size 2", 2)],
)  # fmt: skip
def test_stopped_and_resumed_is_bitwise_uninterrupted(tmp_path, train, flags, ranks):
    train(tmp_path / "whole", flags, ranks)
    train(tmp_path / "run", f"{flags} --exit-interval 4", ranks)
    train(tmp_path / "run", f"{flags} --load {tmp_path / 'run'}", ranks)
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def files(out):
    """Values in the files of the last checkpoint."""
    return {p.name: p.read_bytes() for p in (out / "iter_0000008").glob("*.distcp")}


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_uninterrupted(whole, tmp_path, server, text, train):
    out = tmp_path / "run"
    done = server.run([*SMALL, *COMPILED, "--data", text, "--save", str(out)], kill_once=str(out / LATEST))
    assert done.codes == [-9] and (out / LATEST).read_text() == "4"
    (out / "iter_0000008").mkdir(exist_ok=True)  # what a killed run may leave
    train(out, f"--load {out}")
    assert read_log(out) == read_log(whole[0])


MODELS = {
    "dense": "--num-layers 4",
    "moe": "--num-layers 4 --num-experts 4 --moe-shared-expert-intermediate-size 32",
    "latent": "--num-layers 4 --multi-latent-attention --num-query-groups 4",
}


@pytest.fixture(scope="module")
def eager(tmp_path_factory, train):
    """Of a model: a checkpoint after four steps, and eager Megatron-core's run from there, both on one rank."""
    made = {}

    def make(model):
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            train(folder / "first", f"{MODELS[model]} --exit-interval 4", backend=EAGER)
            shutil.copytree(folder / "first", folder / "start")
            train(folder / "whole", f"{MODELS[model]} --load {folder / 'start'}", backend=EAGER)
            made[model] = folder
        return made[model]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, flags, ranks",
    [
        ("dense", "", 1),
        ("dense", "--no-use-distributed-optimizer", 2),
        ("dense", "--tensor-model-parallel-size 2", 2),
        ("dense", "--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("dense", "--pipeline-model-parallel-size 2", 2),
        ("dense", "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("dense", "--context-parallel-size 2", 2),
        ("dense", "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", 2),
        ("moe", "", 1),
        ("moe", "--expert-model-parallel-size 2", 2),
        ("latent", "", 1),
        ("latent", "--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ],
)
def test_a_compiled_run_has_the_losses_of_eager_megatron(eager, tmp_path, train, model, flags, ranks):
    """In float32, from a checkpoint of one rank: Megatron's state goes to other parallel sizes."""
    folder = eager(model)
    train(tmp_path / "run", f"{MODELS[model]} {flags} --load {folder / 'start'}", ranks)
    check_close(tmp_path / "run", folder / "whole", 1e-5)


@pytest.mark.slow
def test_inductor_is_a_backend_too(whole, tmp_path, train):
    train(tmp_path / "run", backend=["--backend", "inductor"])
    check_close(tmp_path / "run", whole[0], 1e-5)


@pytest.mark.slow
def test_too_little_text_is_a_clear_error_of_one_rank(tmp_path, server):
    (tmp_path / "tiny.txt").write_text("too short")
    done = server.run([*SMALL, "--data", str(tmp_path / "tiny.txt"), "--save", str(tmp_path / "run")], ranks=2)
    assert done.codes == [1, 1] and "fewer than a sequence of 32" in done.errors[0]
    assert not any("Traceback" in error for error in done.errors) and "error: " not in done.errors[1]
