"""examples/train_hf.py as users run it: learns in every kind of model, resumes bitwise, goes on under another plan, and
gives the losses of one eager device under every plan.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.example_runs import Run, Server, read_log

pytest.importorskip("transformers", reason="transformers is an optional dependency")
SMALL = """
    --layers 1 --hidden 32 --ffn 48 --seq-length 32 --batch-size 4 --steps 4 --warmup 1 --eval-every 2
    --eval-batches 1 --save-every 2 --sample-length 4 --peak-tflops 0.1
""".split()
COMPILED, EAGER = ["--codegen", "eager"], ["--backend", "eager"]
MODELS = {"causal": "qwen3", "masked": "bert", "seq2seq": "t5", "vision": "vit"}


@pytest.fixture(scope="module")
def server():
    server = Server("train_hf.py")
    yield server
    server.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n\n".join(f"def fox_{i}():\n    return 'over the lazy dog' * {i % 7}" for i in range(900)))
    return str(path)


@pytest.fixture(scope="module")
def train(server, text):
    """``train(out, words)``: a run that ends well."""

    def run(out: Path, words: str = "", ranks: int = 1, backend: list[str] = COMPILED, model: str = "qwen3") -> Run:
        data = [] if model == "vit" else ["--data", text]
        done = server.run([*SMALL, "--model", model, *data, "--save", str(out), *backend, *words.split()], ranks)
        assert not any(done.codes), "\n".join(done.errors)[-4000:]
        return done

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(out).output


def check_close(rows, right, tolerance):
    """Losses, norms and rates of every step, and validation, are those of ``right``."""
    assert len(rows) == len(right) > 0
    for row, wanted in zip(rows, right):
        assert row == {k: pytest.approx(v, rel=tolerance) for k, v in wanted.items()}, row["step"]


def read_tensors(folder):
    """Every tensor of a checkpoint, whole."""
    held = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in held.items() if hasattr(m, "size")}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def check_same(folder, expected):
    """Two checkpoints have the same bits."""
    found, right = read_tensors(folder), read_tensors(expected)
    assert found.keys() == right.keys() and any("exp_avg" in n for n in right)
    assert [n for n in right if not torch.equal(found[n], right[n])] == []


def test_reports_what_a_user_looks_for(whole):
    out, printed = whole
    for words in ("unigram entropy", "tokens/s", "MFU", "perplexity", "first step (with compilation)", "sample: ",
                  "qwen3 (causal)", "matrix products counted"):  # fmt: skip
        assert words in printed, words
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    log = read_log(out)
    assert [r["step"] for r in log] == [1, 2, 3, 4] and log[-1]["loss"] < log[0]["loss"]
    assert sorted(p.name for p in out.glob("step_*")) == ["step_0000002", "step_0000004"]


def test_two_ranks_go_on_from_one_and_end_as_one(whole, tmp_path, train):
    """Resharded onto a mesh and a plan; the losses are those of one device."""
    out = tmp_path / "run"
    train(out, "--stop-after 1 --eval-batches 0", backend=EAGER)
    words = "--plan zero2 --accumulate 2 --stop-after 3 --eval-batches 0 --save-every 4"
    assert "goes on from step 1" in train(out, words, ranks=2).output
    right = [{k: v for k, v in row.items() if k != "validation"} for row in read_log(whole[0])[:3]]
    check_close(read_log(out), right, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_learns_and_compiled_losses_are_those_of_eager(kind, tmp_path, train):
    words = "--dropout 0 --lr 3e-3 --steps 12"
    printed = train(tmp_path / "run", words, model=MODELS[kind]).output
    train(tmp_path / "eager", words, backend=EAGER, model=MODELS[kind])
    assert f"({kind})" in printed and ("sample: " in printed) == (kind in ("causal", "seq2seq"))
    check_close(read_log(tmp_path / "run"), read_log(tmp_path / "eager"), 1e-3)
    log = read_log(tmp_path / "run")
    assert log[-1]["validation"] < log[1]["validation"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, plan",
    [
        *[("causal", p) for p in ("tp_sp", "zero3", "ulysses", "search")],
        *[("masked", p) for p in ("tp", "zero2")],
        *[("seq2seq", p) for p in ("zero3", "tp")],
        *[("vision", p) for p in ("zero2", "zero3")],
    ],
)
def test_losses_under_plans_are_those_of_one_eager_device(kind, plan, tmp_path, train):
    """With accumulation; in bfloat16 nothing but the sizes of rounding would be told."""
    train(tmp_path / "run", f"--plan {plan} --accumulate 2 --dropout 0", ranks=2, model=MODELS[kind])
    train(tmp_path / "eager", "--dropout 0", backend=EAGER, model=MODELS[kind])
    check_close(read_log(tmp_path / "run"), read_log(tmp_path / "eager"), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--no-packed", "--buckets 16 32 --kind causal", "--dtype bfloat16"])
@pytest.mark.parametrize("plan", ["", "--plan zero2", "--plan tp_sp"])
def test_what_goes_on_has_the_bits_of_what_never_stopped(words, plan, tmp_path, train):
    """With dropout, which draws the numbers of one device, accumulation, and a synchronous checkpoint in between."""
    words, ranks = f"{words} {plan} --dropout 0.1 --accumulate 2", 2 if plan else 1
    train(tmp_path / "whole", words, ranks, model="gpt_neox")
    train(tmp_path / "run", f"{words} --stop-after 3 --no-async-save", ranks, model="gpt_neox")
    assert "goes on from step 3" in train(tmp_path / "run", words, ranks, model="gpt_neox").output
    check_same(tmp_path / "run" / "step_0000004", tmp_path / "whole" / "step_0000004")
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")


@pytest.mark.slow
def test_one_plan_goes_on_where_another_stopped(tmp_path, train):
    """With dropout: every plan draws what one device draws."""
    chain = [("zero3", 2), ("tp_sp", 2), ("none", 1), ("ulysses", 2), ("search", 2), ("zero2+tp", 4)]
    words = f"--dropout 0.1 --steps {len(chain)} --eval-batches 0"
    for step, (plan, ranks) in enumerate(chain, 1):
        train(tmp_path / "run", f"{words} --plan {plan} --stop-after {step}", ranks, model="gpt_neox")
    train(tmp_path / "whole", words, model="gpt_neox")
    check_close(read_log(tmp_path / "run"), read_log(tmp_path / "whole"), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_pretrained_weights_are_where_training_begins(ranks, tmp_path, train):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=300,
                                  num_key_value_heads=2, intermediate_size=48, head_dim=8)  # fmt: skip
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "weights")
    words = f"--from-pretrained {tmp_path / 'weights'} --lr 0 --min-lr 0"
    printed = train(tmp_path / "run", words + (" --plan zero3" if ranks == 2 else ""), ranks).output
    assert "llama (causal)" in printed
    found = read_tensors(tmp_path / "run" / "step_0000004")
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "weights").named_parameters():
        assert torch.equal(found[f"model.{name}"], value), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_ranks_are_killed_ends_with_the_bits_of_an_undisturbed_run():
    """``python -m benchmarks.kill_resume`` does it twenty times."""
    from benchmarks import kill_resume

    assert kill_resume.measure(count=2, jobs=1, seed=3) == 0


def test_a_checkpoint_of_another_run_is_refused_by_name(whole, server, text):
    words = [*SMALL, "--data", text, "--save", str(whole[0]), "--lr", "0.1", "--hidden", "16"]
    done = server.run(words)
    assert done.codes == [1] and "Traceback" not in done.errors[0]
    (line,) = [line for line in done.errors[0].splitlines() if line.startswith("error: ")]
    assert "--lr 0.001, not 0.1" in line and "--hidden 32, not 16" in line and "--layers" not in line


@pytest.mark.parametrize(
    "words, error",
    [
        ("--model qwn3", '--model qwn3 (did you mean "qwen3"?)'),
        ("--model qwen3 --kind vision", "--kind vision: there is no such model of qwen3; valid: causal"),
        ("--set hidden_sizes=3", "--set hidden_sizes=3"),
        ("--plan zero4", 'no plan is named "zero4"'),
        ("--resume require", "--resume require: there is no checkpoint in"),
        ("--data /nonexistent", "there is no file /nonexistent"),
        ("--model mamba --packed", "--packed: documents in a row of mamba would see each other"),
        ("--config /nonexistent", "--config /nonexistent: "),
        ("--device npu", "--device npu: torch_npu cannot be imported"),
    ],
)
def test_what_is_found_while_the_model_is_built_is_one_line(tmp_path, server, text, words, error):
    done = server.run([*SMALL, "--data", text, "--save", str(tmp_path), *words.split()])
    lines = [line for line in done.errors[0].splitlines() if line.startswith("error: ")]
    assert done.codes == [1] and len(lines) == 1 and "Traceback" not in done.errors[0], done.errors[0][-2000:]
    assert error in lines[0]


STAGES = "--layers 2 --dropout 0 --steps 3 --save-every 2 --eval-every 1"


def test_stages_of_a_pipeline_train_as_one_device_and_go_on_there(tmp_path, train):
    """Two steps as two stages, with a weight that both have; the third on one device."""
    words = f"{STAGES} --set tie_word_embeddings=true"
    printed = train(tmp_path / "run", f"{words} --plan pp2 --stop-after 2 --sample-length 0", ranks=2).output
    assert "2 microbatches, schedule 1F1B:1" in printed
    assert "goes on from step 2" in train(tmp_path / "run", words, backend=EAGER).output
    train(tmp_path / "whole", words, backend=EAGER)
    check_close(read_log(tmp_path / "run"), read_log(tmp_path / "whole"), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, words, ranks",
    [
        ("qwen3", "--plan pp2 --schedule Interleaved1F1B:2 --layers 4", 2),
        ("llama", "--plan pp2+zero3 --schedule ZBVZeroBubble:2 --layers 4 --accumulate 2", 4),
        ("qwen3", "--plan pp2+tp_sp", 4),
        ("gpt2", "--plan pp2 --buckets 16 32", 2),
        ("t5", "--plan pp2", 2),
        ("bert", "--plan pp2", 2),
        ("vit", "--plan pp2", 2),
        ("qwen3", "--plan search --mesh pp=2,dp=2", 4),
    ],
)
def test_losses_and_samples_of_stages_are_those_of_one_eager_device(model, words, ranks, tmp_path, train):
    layers = "--layers 4" if "--layers" in words else ""
    buckets = "--buckets 16 32" if "--buckets" in words else ""
    printed = train(tmp_path / "run", f"{STAGES} {words}", ranks, model=model).output
    expected = train(tmp_path / "eager", f"{STAGES} {layers} {buckets}", backend=EAGER, model=model).output
    check_close(read_log(tmp_path / "run"), read_log(tmp_path / "eager"), 1e-3)
    samples = [[line for line in text.splitlines() if line.startswith("sample: ")] for text in (printed, expected)]
    assert samples[0] == samples[1] and (len(samples[0]) == 1) == (model in ("qwen3", "llama", "gpt2", "t5"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words, ranks", [("--plan pp2", 2), ("--plan pp2+zero2 --schedule InterleavedZeroBubble:2", 4)]
)
def test_stages_that_go_on_have_the_bits_of_those_that_never_stopped(words, ranks, tmp_path, train):
    """With dropout, of which each rank draws its own layers'; a tied weight; clipping by the norm of all stages."""
    words = f"{words} --layers 4 --dropout 0.1 --clip 0.5 --set tie_word_embeddings=true"
    train(tmp_path / "whole", words, ranks, model="gpt_neox")
    train(tmp_path / "run", f"{words} --stop-after 3 --no-async-save", ranks, model="gpt_neox")
    assert "goes on from step 3" in train(tmp_path / "run", words, ranks, model="gpt_neox").output
    check_same(tmp_path / "run" / "step_0000004", tmp_path / "whole" / "step_0000004")
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checkpoints_go_from_plan_to_stages_and_back(tmp_path, train):
    chain = [("pp2", 2), ("zero3", 2), ("pp2+tp_sp", 4), ("none", 1), ("pp2+zero2", 4), ("tp_sp", 2)]
    words = f"--layers 2 --dropout 0 --steps {len(chain)} --eval-batches 0 --clip 0.5"
    for step, (plan, ranks) in enumerate(chain, 1):
        train(tmp_path / "run", f"{words} --plan {plan} --stop-after {step}", ranks)
    train(tmp_path / "whole", words)
    check_close(read_log(tmp_path / "run"), read_log(tmp_path / "whole"), 1e-4)


@pytest.mark.slow
def test_bfloat16_in_stages_learns(tmp_path, train):
    train(tmp_path / "run", "--layers 2 --steps 8 --lr 3e-3 --plan pp2 --dtype bfloat16 --dropout 0", 2)
    train(tmp_path / "one", "--layers 2 --steps 8 --lr 3e-3 --dtype bfloat16 --dropout 0 --accumulate 2")
    check_close(read_log(tmp_path / "run"), read_log(tmp_path / "one"), 2e-2)
