"""Ten questions: what the answers say, that command, report and page say the same, and the schedule that they read."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import types

import pytest
import torch
from torch import nn

from mindspeed_fx import cli
from mindspeed_fx.errors import OptionError
from mindspeed_fx.passes.overlap.model.step_lanes import step_lanes
from mindspeed_fx.planning.what_if import parse_form
from mindspeed_fx.report.answers import ask, source
from mindspeed_fx.report.answers.base import Change, Facts
from mindspeed_fx.report.answers.step import parts_of
from mindspeed_fx.report.facts import step_totals
from tests.models import Llama, explain, tokens
from tests.report.questions import MODELS, PAGE
from tests.report.test_page import rank

FORMS = ["level 0", "without norms", "batch 4"]


@pytest.fixture(scope="module")
def report():
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"codegen": "eager", "hardware": "cpu", "disable": ["fusion.rope"]}
    import mindspeed_fx

    return mindspeed_fx.explain(Llama(layers=1), *tokens(), options=options, what_if=FORMS)


@pytest.fixture(scope="module")
def folder(report, tmp_path_factory):
    return report.save(str(tmp_path_factory.mktemp("answers")))


def asked(report, name, about=None):
    (facts,) = source.of_records(report.graphs)
    return ask.ask(facts, name, about)


def test_there_are_ten_and_an_unknown_one_has_the_nearest(report):
    assert len(ask.QUESTIONS) == 10 and all(f"  {q.name}" in ask.list_text() for q in ask.QUESTIONS)
    with pytest.raises(OptionError, match='did you mean "exposed".*valid: unfused, peak'):
        report.ask("expose")
    with pytest.raises(OptionError, match='did you mean "attention"'):
        report.ask("unfused", "atention")
    with pytest.raises(OptionError, match='did you mean "norms"'):
        report.ask("bought", "norm")
    with pytest.raises(OptionError, match="nothing is expected behind it"):
        report.ask("peak", "3")
    for name, about in (("level", "7"), ("batch", "0"), ("batch", "many")):
        with pytest.raises(OptionError, match=f"{name}: '{about}'; valid"):
            report.ask(name, about)


def test_what_was_left_and_why(report):
    assert asked(report, "unfused").lines == ("none: 1 of 1 attention are fused",)
    assert asked(report, "unfused", "rotations").lines[0] == "fusion.rope is off"
    norms = asked(report, "unfused", "norms")
    assert norms.lines[0] == "none: 3 of 3 norms are fused" and not norms.rows


def test_a_layer_that_lost_its_fusion_is_named_with_the_reason():
    run = {"report": {"name": "fusion.attention", "rewrites": [{}], "notes": [], "skipped": []}}
    run["report"]["skipped"] = [{"module": "layers.1", "reason": "the scores are returned", "source": "a.py:3: x"}]
    answer = ask.ask(Facts({"runs": [run], "effective": {"passes": ["fusion.attention"], "level": 2}}), "unfused")
    assert answer.lines == ("1 of 2 attention are fused",)
    assert answer.rows == [("layers.1", "attention", "a.py:3: x", "the scores are returned")]


def test_the_peak_is_that_of_the_memory_model(report):
    answer, memory = asked(report, "peak"), report.graphs[0]
    totals = step_totals([memory])
    values = json.loads(report.to_json())["graphs"][0]["memory"]
    assert values["peak"] == totals["peak"] == sum(x["bytes"] for x in values["live"]) + values["others"]["bytes"]
    parameters = sum(p.numel() * p.element_size() for p in Llama(layers=1).parameters())
    assert values["given"]["trainable"] == parameters and values["given"]["elements"] == parameters // 4
    assert f"{values['at']['operator']} of {values['at']['module']}" in answer.lines[0]


def test_the_pass_that_made_a_node_is_named(report):
    answer = asked(report, "node", "swiglu_default")
    assert [(row[0].split()[1], row[2]) for row in answer.rows] == [("fusion.swiglu", "made")]
    gone = next(n for s in report.sites("fusion.swiglu") for n in s.nodes)
    said = asked(report, "node", gone)
    assert any("fusion.swiglu replaced it, with others, by mindspeed::swiglu" in line for line in said.lines)
    with pytest.raises(OptionError, match='did you mean "swiglu_default"'):
        report.ask("node", "swiglu_defalt")


def test_a_node_that_is_read_by_what_changed_is_found():
    change = Change(3, "captured", "fusion.a", '-    b: "f32[1]" = aten.exp(a)\n+    c: "f32[1]" = mindspeed.a(a)\n')
    facts = Facts({"runs": []}, lambda: [change], lambda: {"x": '    a: "f32[1]" = aten.neg(z)\n'})
    assert ask.ask(facts, "node", "a").rows == [("03 fusion.a", "captured", "read by", 'c: "f32[1]" = mindspeed.a(a)')]
    assert ask.ask(facts, "node", "b").rows[0][2] == "removed" and ask.ask(facts, "node", "c").rows[0][2] == "made"


def test_another_level_costs_what_that_level_costs(report):
    forms = report.graphs[0].what_if
    assert dataclasses.replace(forms.base, value="") == dataclasses.replace(
        forms.base, value="", **step_totals(report.graphs)
    )
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = explain(Llama(layers=1), *tokens(), hardware="cpu", disable=["fusion.rope"], level=0)
    level = next(v for v in forms.variants if v.kind == "level")
    assert not level.error and step_totals(plain.graphs) == {
        name: getattr(level, name) for name in ("seconds", "kernels", "bytes", "peak", "resident")
    }
    assert level.rewrites == sum(plain.counts.values()) < forms.base.rewrites and level.seconds > forms.base.seconds
    answer = asked(report, "level", "0")
    assert answer.lines[0].startswith("level 0: ") and "instead of" in answer.lines[0] and len(answer.rows) == 2
    assert "not modelled here" in asked(report, "level", "1").lines[0]
    assert asked(report, "level", "2").lines[0] == "it is compiled at level 2"


def test_what_a_family_bought_is_modelled_without_it(report):
    answer = asked(report, "bought")
    assert answer.lines[0].endswith("places were rewritten") and "modelled: it saves" in answer.lines[1]
    assert "nothing: no gates" not in report.ask("bought", "gates")
    assert asked(report, "bought", "dropout").lines == ("nothing: no dropout were rewritten in this graph",)


def test_whether_a_batch_fits(report):
    sizes = {int(v.value): v for v in (report.graphs[0].what_if.base, report.graphs[0].what_if.variants[2])}
    assert sizes[4].peak > sizes[2].peak and sizes[4].resident == sizes[2].resident + 2 * 2 * 16 * 8
    (facts,) = source.of_records(report.graphs, memory=sizes[4].peak + sizes[4].resident)
    states = 8 * facts.values["memory"]["given"]["elements"]
    assert "batch 4 fits without Adam's states alone" in ask.ask(facts, "batch", "4").lines[0]
    assert "batch 2 does not fit" in ask.ask(dataclasses.replace(facts, memory=1024), "batch", "2").lines[0]
    roomy = dataclasses.replace(facts, memory=sizes[4].peak + sizes[4].resident + states)
    assert "batch 4 fits: " in ask.ask(roomy, "batch", "4").lines[0]
    line = ask.ask(roomy, "batch", "6").lines[0]
    assert "batch 6 fits without Adam's states alone" in line and "by a line through batch 2 and 4" in line


def test_the_parts_of_the_first_step_add_up(report):
    times = report.graphs[0].seconds
    parts = parts_of(times)
    assert times["dynamo"] > 0 and times["first step"] > times["compile"] > times["passes"]
    assert sum(parts.values()) == pytest.approx(times["first step"], rel=0.02)
    known = {"dynamo": 1.0, "compile": 10.0, "capture": 1.0, "passes": 2.0, "lowering": 1.0, "codegen": 4.0}
    parts = parts_of({**known, "compilers": 3.0, "first step": 12.0})
    assert (parts["autograd"], parts["generation"], parts["running"]) == (2.0, 1.0, 1.0)


def test_what_is_approximated(report):
    answer = asked(report, "approximated")
    kinds = {row[0]: row[2] for row in answer.rows}
    assert kinds["fusion.swiglu"] == "close" and "casts to a shorter type that passes added: 0" in answer.lines
    made_exact = {**json.loads(report.to_json())["graphs"][0], "lowered": [{"operator": "mindspeed.attention_seeded"}]}
    made_exact["casts"] = [{"pass": "a", "stage": "captured", "more": 2}]
    made_exact["runs"] = [{**made_exact["runs"][0], "exact": True}]
    made_exact["runs"][0]["report"]["rewrites"] = [{}]
    answer = ask.ask(Facts(made_exact), "approximated")
    assert [row[2] for row in answer.rows] == ["exact", "type", "random"] and answer.lines[1].endswith("added: 2")


def test_a_pass_that_brings_a_shorter_type_is_told(report):
    from mindspeed_fx.report.facts import facts_of
    from mindspeed_fx.report.records import PassReport, PassRun

    before = 'def graph(a):\n    # a: "f32[2]"\n    b: "f32[2]" = aten.exp(a)\n'
    after = before + '    c: "bf16[2]" = aten._to_copy(b, dtype=torch.bfloat16)\n'
    run = PassRun(PassReport("mine"), "captured", 0.0, 1, 2, before, after)
    record = dataclasses.replace(report.graphs[0], runs=[run])
    assert facts_of(record)["casts"] == [{"pass": "mine", "stage": "captured", "more": 1}]
    wider = PassRun(PassReport("mine"), "captured", 0.0, 2, 1, after, before)
    assert facts_of(dataclasses.replace(record, runs=[wider]))["casts"][0]["more"] == -1


def test_what_a_rank_does_differently(tmp_path, capsys):
    rows = [rank(n, 2 if n != 3 else 5) for n in range(4)]
    facts = Facts(rows[0], ranks=lambda: rows)
    answer = ask.ask(facts, "rank", "3")
    assert answer.lines[0].startswith("rank 3 differs in 1 thing") and answer.rows == [("0", "rewrites of a", "5", "2")]
    assert ask.ask(facts, "rank", "1").lines[0].startswith("nothing: rank 1 does what most")
    assert ask.ask(facts, "rank").rows == [("0", "rewrites of a", "2", "2", "2", "5")]
    with pytest.raises(OptionError, match="this dump has 0, 1, 2, 3"):
        ask.ask(facts, "rank", "9")
    missing = Facts(rows[0], ranks=lambda: [*rows, {**rank(3, 1), "index": 1}])
    assert ("1", "graph", "0", "not there") in ask.ask(missing, "rank", "3").rows


def test_command_report_and_page_give_one_answer(report, folder, capsys):
    page = html.unescape((folder / "rank0" / "graph0" / "report.html").read_text())
    for q in ask.QUESTIONS:
        about = ["swiglu_default"] if q.name == "node" else []
        assert cli.main(["ask", str(folder), q.name, *about]) == 0
        assert capsys.readouterr().out.rstrip("\n") == report.ask(q.name, *about), q.name
        if q.name != "node":
            answer = asked(report, q.name)
            assert all(f"<p>{line}</p>" in page for line in answer.lines), q.name
            assert all(f"<code>{cell}</code>" in page for row in answer.rows for cell in row), q.name
    assert cli.main(["ask", str(folder), "peak", "--json"]) == 0
    (values,) = json.loads(capsys.readouterr().out)
    assert values["lines"] == list(asked(report, "peak").lines)


def test_the_page_of_documentation_has_the_answers_of_both_models(report):
    """In form: every question as the command is called, its title, and the columns that the answer has today."""
    blocks = re.findall(r"```text\n\$ mindspeed-fx ask (\w+) (\w+)(?: (\S+))?\n(.*?)```", PAGE.read_text(), re.S)
    assert [(model, name) for model, name, _, _ in blocks] == [(m, q.name) for q in ask.QUESTIONS for m in MODELS]
    asked_here = {"peak": "", "node": "swiglu_default", "level": "0", "bought": "", "step1": "", "approximated": ""}
    heads = {name: " ".join(asked(report, name, about).head).split() for name, about in asked_here.items()}
    for model, name, about, text in blocks:
        lines = text.splitlines()
        assert lines[0] == ask.find_question(name).title(about) and len(lines) > 1, (model, name)
        assert name not in heads or heads[name] in [line.split() for line in lines], (model, name)


def test_the_command_names_what_is_wrong(tmp_path, folder, capsys):
    for arguments, words in (
        ([str(folder), "peek"], 'did you mean "peak"'),
        ([str(tmp_path), "peak"], "is no dump"),
        (["nowhere", "peak"], "neither SCRIPT.py:FUNCTION nor a directory"),
        ([str(folder), "peak", "--options", '{"level": 1}'], "--options is for SCRIPT.py:FUNCTION"),
        ([str(folder), "batch", "8", "--memory", "60"], 'option "memory" is'),
    ):
        assert cli.main(["ask", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("mindspeed-fx ask: ") and error.count("\n") == 1
    assert cli.main(["index", str(tmp_path)]) == 2 and "is no dump" in capsys.readouterr().err
    assert cli.main(["ask", str(folder)]) == 0 and "batch [N]" in capsys.readouterr().out


def test_the_index_of_gathered_ranks_is_written_again(folder, tmp_path, capsys):
    import shutil

    for number in (0, 1):
        there = tmp_path / f"rank{number}" / "graph0"
        shutil.copytree(folder / "rank0" / "graph0", there)
        values = json.loads((there / "metadata.json").read_text())
        (there / "metadata.json").write_text(json.dumps({**values, "rank": number}))
    assert cli.main(["index", str(tmp_path)]) == 0 and "2 graphs of 2 ranks" in capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    assert "rank1/graph0/report.html" in page and "What does rank 1 do differently?" in page


SCRIPT = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)), (torch.randn(2, 8),)
"""


def test_a_script_is_asked_without_generating_code(tmp_path, capsys, monkeypatch):
    (tmp_path / "model.py").write_text(SCRIPT)
    monkeypatch.setenv("CXX", "no-compiler")
    source = f"{tmp_path}/model.py:make"
    assert cli.main(["ask", source, "batch", "8", "--options", '{"hardware": "cpu"}', "--memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "batch 8 fits: it takes" in out and "of 1.00 GiB (--memory)" in out
    assert cli.main(["ask", source, "bought", "norms", "--options", '{"hardware": "cpu"}']) == 0
    assert "1 places were rewritten" in capsys.readouterr().out


def test_forms_of_the_step_are_checked():
    assert parse_form("without norms") == ("without", "norms")
    for text, words in (
        ("levl 1", 'mean "level"'),
        ("without norm", 'mean "norms"'),
        ("level 9", "0, 1, 2"),
        ("batch 0", "from 1"),
    ):
        with pytest.raises(OptionError, match=words):
            parse_form(text)
    with pytest.raises(OptionError, match="what_if is 3"):
        import mindspeed_fx

        mindspeed_fx.explain(nn.Linear(2, 2), torch.ones(2, 2), what_if=3)


def kernel(name, seconds, reads=(), tier=""):
    spec = lambda key: types.SimpleNamespace(key=key)  # noqa: E731
    call = types.SimpleNamespace(name=name, reads=[spec(k) for k in reads], writes=[spec(name)])
    node = types.SimpleNamespace(name=name, members=(), seconds=seconds, tier=tier, operator=f"x.{name}")
    return call, node


def estimate_of(*kernels, waits=()):
    calls = types.SimpleNamespace(calls=[c for c, _ in kernels], waits=list(waits))
    return types.SimpleNamespace(nodes=[n for _, n in kernels], calls=calls)


def test_a_collective_is_exposed_as_long_as_compute_stands_still():
    kernels = [kernel("a", 1.0), kernel("sent", 3.0, ["a"], "node"), kernel("b", 1.0), kernel("c", 1.0, ["sent", "b"])]
    lanes = step_lanes(estimate_of(*kernels))
    assert lanes.names == ("compute", "node") and lanes.lane_of == (0, 1, 0, 0)
    assert lanes.start == (0.0, 1.0, 1.0, 4.0) and lanes.seconds == 5.0 and lanes.exposed == {1: 2.0}
    assert lanes.reasons[1].startswith("2000.000 ms of 3000.000 ms exposed")
    early = step_lanes(estimate_of(*kernels, waits=[(2, "sent")]))  # the graph waits before b
    assert early.start == (0.0, 1.0, 4.0, 5.0) and early.exposed == {1: 3.0}
    both = [kernel("long", 5.0, tier="node"), kernel("short", 3.0, tier="rack")]
    ends = step_lanes(estimate_of(*both, waits=[(2, "long"), (2, "short")]))
    assert ends.seconds == 5.0 and ends.exposed == {0: 5.0}, "what is waited for first"
    alone = step_lanes(estimate_of(kernel("a", 1.0), kernel("b", 2.0)))
    assert alone.names == ("compute",) and alone.seconds == 3.0 and not alone.exposed
