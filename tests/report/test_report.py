"""Dumps, explain, HTML, tlparse artifacts and the command line show what happened, readably and truly."""

import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx import cli
from mindspeed_fx.report import terminal
from tests.models import LLAMA_COUNTS, Llama, explain, fusion_counts, tokens


@pytest.fixture(scope="module")
def report():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return explain(Llama(), *tokens())


def test_explain_counts_sites_and_options(report):
    assert report.graph_count == 1 and report.break_reasons == []
    assert fusion_counts(report) == LLAMA_COUNTS
    site = report.sites("fusion.swiglu")[1]
    assert site.operator == "mindspeed::swiglu" and site.module == "blocks.1" and "F.silu(gate) * up" in site.source
    assert report.effective_options["codegen"] == "eager" and "fusion.rope" in report.effective_options["passes"]
    with pytest.raises(KeyError, match='did you mean "fusion.rope"'):
        report.sites("fusion.rop")
    text = str(report)
    assert "1 graph, 0 graph breaks" in text and "fusion.attention" in text
    assert json.loads(report.to_json())["counts"]["fusion.rope"] == 4


def test_explain_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[2].weight.grad = torch.full((4, 4), 7.0)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    state = torch.get_rng_state()
    explain(model, torch.randn(3, 4))
    assert model[2].weight.grad.eq(7).all() and model[2].bias.grad is None
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    explain(model, torch.ones(3, 4))
    torch.set_rng_state(state)


def test_explain_leaves_what_its_inputs_were_computed_from_as_it_was(recwarn):
    def model(x, same, label):
        return same.relu_().mul(x).sum() + label

    w, label = torch.randn(3, 4, requires_grad=True), torch.tensor(1.0)
    label.grad = torch.ones(())
    x = w.exp()
    value = x.detach().clone()
    mindspeed_fx.explain(model, x, x, label=label, options={"codegen": "eager"})
    assert w.grad is None and label.grad is not None and torch.equal(x, value)
    x.sum().backward()
    torch.testing.assert_close(w.grad, value)
    assert not [w for w in recwarn if "not a leaf" in str(w.message)]


def test_explain_of_a_function_without_gradient():
    assert explain(lambda x: x.softmax(-1), torch.randn(3)).graph_count == 1


def test_dump_layout(report, tmp_path):
    report.save(str(tmp_path))
    folder = tmp_path / "rank0" / "graph0"
    names = {p.name for p in folder.iterdir()}
    assert {"index.md", "metadata.json", "report.html"} <= names and (tmp_path / "index.md").exists()
    index = [run.report.name for run in report.graphs[0].runs].index("fusion.swiglu")
    stem = f"{index:02d}.captured.fusion.swiglu"
    assert {f"{stem}.before.py", f"{stem}.after.py", f"{stem}.diff"} <= names
    diff = (folder / f"{stem}.diff").read_text()
    assert "-    silu" in diff and "+    swiglu_default" in diff and diff.count("\n+    swiglu") == 2
    text = (folder / "index.md").read_text()
    for words in (
        "| fusion.swiglu | 2 |",
        "blocks.1",
        "## Effective options",
        "| codegen | eager |",
        "## Kernels",
        "flash attention",
    ):
        assert words in text, words
    assert json.loads((folder / "metadata.json").read_text())["counts"]["fusion.attention"] == 2
    unchanged = "canonicalize.autograd_function"
    assert unchanged in [r.report.name for r in report.graphs[0].runs]
    assert not [n for n in names if unchanged in n]  # only passes that changed the graph have files


def test_code_is_readable(report):
    after = next(r.after for r in report.graphs[0].runs if r.report.name == "fusion.attention")
    assert "rms_norm" not in after.split("def ")[0] and '"f32[2, 16, 32]"' in after and "models.py" in after


def test_dump_option_and_environment_write_the_same(tmp_path, monkeypatch):
    x = torch.randn(2, 8)
    torch.compile(nn.RMSNorm(8), backend="mindspeed", options={"codegen": "eager", "dump": str(tmp_path / "a")})(
        x
    ).sum().backward()
    torch._dynamo.reset()
    monkeypatch.setenv("MINDSPEED_FX_DUMP", str(tmp_path / "b"))
    torch.compile(nn.RMSNorm(8), backend="mindspeed", options={"codegen": "eager"})(x).sum().backward()
    files = [sorted(p.name for p in next((tmp_path / d / "rank0").iterdir()).iterdir()) for d in "ab"]
    assert files[0] == files[1] and any("backward" in f for f in files[0])


def test_an_unwritable_directory_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match='option "dump": cannot write to'):
        torch.compile(nn.RMSNorm(8), backend="mindspeed", options={"codegen": "eager", "dump": str(tmp_path / "file")})(
            torch.randn(2, 8)
        )


TRACED = """
import torch
model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8))
torch.compile(model, backend="mindspeed", options={"codegen": "eager"})(torch.randn(2, 8)).sum().backward()
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A log of TORCH_TRACE, and what TORCH_LOGS printed of the same run."""
    folder = tmp_path_factory.mktemp("trace")
    names = "mindspeed_fx.report.code,mindspeed_fx.report.diffs"
    environment = {**os.environ, "TORCH_TRACE": str(folder), "TORCH_LOGS": names}
    done = subprocess.run([sys.executable, "-c", TRACED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.log")), done.stderr


def test_structured_trace_has_our_artifacts_under_their_compilation(trace):
    lines = trace[0].read_text().splitlines()
    names = {}
    for line in lines:
        head = line.partition("] ")[2]
        if '"artifact": {"name": "mindspeed_fx' in head:
            values = json.loads(head)
            names.setdefault(f"{values['frame_id']}/{values['frame_compile_id']}", []).append(
                values["artifact"]["name"]
            )
    (ours,) = names.values()
    fused = next(n for n in ours if n.endswith("captured_fusion.rms_norm"))
    assert list(names) == ["0/0"] and {f"{fused}.diff", "mindspeed_fx_index"} < set(ours)
    assert {f"mindspeed_fx_graph_{stage}" for stage in ("dynamo", "forward", "backward")} < set(ours)
    assert ours.count(fused) == 1 and "mindspeed.rms_norm(" in trace[0].read_text()


def test_tlparse_lists_our_artifacts(trace, tmp_path):
    program = shutil.which("tlparse") or os.path.join(os.path.dirname(sys.executable), "tlparse")
    if not os.path.exists(program):
        pytest.skip("tlparse is not installed (extra browser)")
    out = tmp_path / "out"
    subprocess.run([program, "--no-browser", "-o", str(out), str(trace[0])], check=True, capture_output=True)
    index = (out / "index.html").read_text()
    for name in ("mindspeed_fx_index", "captured_fusion.rms_norm", "mindspeed_fx_graph_forward"):
        assert re.search(rf'href="-_0_0_0/[^"]*{re.escape(name)}', index), name


def test_graphs_and_differences_are_logged_by_their_names(trace):
    assert "graph 0, captured, fusion.rms_norm" in trace[1] and "mindspeed.rms_norm(" in trace[1]
    assert all(f"graph 0, {stage}" in trace[1] for stage in ("dynamo", "forward", "backward"))
    assert "effective options" not in trace[1]


@pytest.fixture
def command(capsys, monkeypatch):
    """The command line in this process: (status, what it printed, what it complained of)."""

    def run(*args, cwd=None):
        if cwd is not None:
            monkeypatch.chdir(cwd)
        torch._dynamo.reset()
        status = cli.main(list(args))
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import sys, torch
        def make():
            return torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)), (torch.randn(2, 8),)
        if __name__ == "__main__":
            model, args = make()
            if "--quiet" not in sys.argv:
                torch.compile(model, backend="mindspeed", options={"codegen": "eager"})(*args).sum().backward()
    """)
    )
    return tmp_path


def test_explain_command_on_a_script_and_a_function(script, command):
    status, out, err = command("explain", "train.py", "--json", cwd=script)
    assert status == 0 and json.loads(out)["counts"]["fusion.rms_norm"] == 1, err
    status, out, err = command("explain", "train.py:make", "--options", '{"codegen": "eager"}', "--save", "out")
    assert status == 0 and "fusion.rms_norm" in out and (script / "out/index.html").exists(), err


def test_the_command_line_is_a_module():
    done = subprocess.run([sys.executable, "-m", "mindspeed_fx.cli", "passes"], capture_output=True, text=True)
    assert done.returncode == 0 and "fusion.rms_norm" in done.stdout, done.stderr


@pytest.mark.parametrize("args, status, words", [
    (("train.py", "--", "--quiet"), 1, "compiled nothing"),
    (("train.py:nope",), 2, "there is no function 'nope'"),
    (("missing.py",), 2, "missing.py"),
    (("train.py:make", "--options", '{"levl": 1}'), 2, 'did you mean "level"'),
])  # fmt: skip
def test_explain_command_errors(script, command, args, status, words):
    returned, out, err = command("explain", *args, cwd=script)
    assert returned == status and words in err + out, err


def test_doctor_and_passes(command):
    found = json.loads(command("doctor", "--json")[1])
    assert (
        found["installed"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
        and found["torch_compile"] == "is torch's own"
    )
    targets = {(t["target"], t["codegen"]): t for t in found["targets"]}
    assert targets["cpu", "eager"]["works"]
    assert all(t["works"] or t["reason"] for t in targets.values())
    listing = command("passes")[1]
    assert all(p.name in listing for p in mindspeed_fx.passes.registered())
    assert all(p.description.endswith(".") for p in mindspeed_fx.passes.registered())


def test_explain_again_and_again():
    """Dynamo keeps what it compiled: each report must come from a compilation of its own, past any limit on
    recompiling.
    """
    model, inputs = Llama(layers=1), torch.randint(0, 64, (1, 8))
    with torch._dynamo.config.patch(recompile_limit=2):
        counts = [explain(model, inputs, inputs).counts for _ in range(4)]
    assert counts[0] and all(c == counts[0] for c in counts)


def test_the_text_answers_first_and_fits_a_terminal(report):
    lines = str(report).splitlines()
    assert lines[:2] == [
        "1 graph, 0 graph breaks",
        "fused: 2 of 2 attention, 5 of 5 norms, 4 of 4 rotations, 2 of 2 gates, 1 of 1 losses",
    ]
    assert re.match(r"forward, modelled: \d+ -> \d+ us, \d+ -> \d+ kernels, [\d.]+ -> [\d.]+ MB", lines[3])
    assert re.match(r"step, modelled: [\d.]+ ms \([\d.]+ to [\d.]+\), peak [\d.]+ KiB$", lines[4])
    (idle,) = [line for line in lines if line.startswith("nothing to do: ")]
    assert idle == f"nothing to do: {len(report.idle)} passes; report.idle and the page say why"
    assert not [name for name in report.idle if name in "\n".join(lines)]
    assert "the model is not parallelized" in report.idle["sharding.verify"][0] and "fusion.dropout_add" in report.idle
    modelled = lines.index(next(line for line in lines if line.startswith("modelled for ")))
    assert max(map(len, lines[:modelled])) <= 100
    assert report.to_dict()["counts"] == report.counts and report._repr_html_().startswith("<pre>1 graph")


def test_colours_repeat_the_words_and_are_for_terminals_alone(report, monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    plain, coloured = io.StringIO(), Terminal()
    for stream in (plain, coloured):
        terminal.show(str(report), stream)
    assert plain.getvalue() == f"{report}\n" and "\x1b[" in coloured.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured.getvalue()).rstrip() == str(report).rstrip()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.is_coloured(coloured)


def test_logs_tell_of_sites_and_near_misses(monkeypatch):
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append
    log = logging.getLogger("mindspeed_fx")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.DEBUG)
    log.manager._clear_cache()
    torch._dynamo.reset()
    compiled = torch.compile(Llama(), backend="mindspeed", options={"codegen": "eager"})
    compiled(*tokens()).sum().backward()
    log.manager._clear_cache()
    told = [r.getMessage() for r in lines if r.levelname == "INFO"]
    assert any(re.match(r"graph \d+ \(captured.*fusion\.rope 4.*; \d+ near misses$", text) for text in told), told
    details = [r.getMessage() for r in lines if r.levelname == "DEBUG"]
    assert sum(text.startswith("fusion.rope: mindspeed::rope at ") for text in details) == 4
    assert any("left alone at" in text for text in details)
