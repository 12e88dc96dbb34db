"""Dumps and pages of models whose names are attacks: files stay in the folder that the user named, pages run
nothing."""

from __future__ import annotations

import html.parser
import os
import re
import shutil

import pytest
import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx.cost import calibrated
from mindspeed_fx.passes import PassReport, base, register
from mindspeed_fx.report import dump, svg
from mindspeed_fx.report.answers import step
from mindspeed_fx.report.html import Section, sections_page
from mindspeed_fx.report.records import GraphRecord, PassRun, Site, Skip
from mindspeed_fx.training.tensor_dump import compare_dumps, dump_tensors

SCRIPT = "<script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(2)>'
PLACES = ("../../outside", "/outside", "..", "a/b", "..\\outside", "\0zero", "n" * 300)


class Elements(html.parser.HTMLParser):
    """Tags of a page, and what would run or be fetched."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.bad = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.bad += [f"{tag} {k}={v}" for k, v in attrs if k.startswith("on") or "javascript:" in (v or "")]
        self.bad += [tag] * (tag in ("img", "iframe", "object", "embed", "b64"))


def model(*names):
    """A norm and a gate, in modules of these names."""

    class Leaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
            gate, up = normal.chunk(2, -1)
            return torch.cat((nn.functional.silu(gate) * up, up), -1)

    inner = Leaf()
    for name in reversed(names):
        outer = nn.Sequential()
        outer.add_module(name, inner)
        inner = outer
    return inner


def pages_of(folder):
    return {p.name: p.read_text() for p in sorted(folder.rglob("*.html"))}


def dumped(folder, *names):
    torch._dynamo.reset()
    compiled = torch.compile(
        model(*names), backend="mindspeed", options={"codegen": "eager", "dump": str(folder), "level": 2}
    )
    compiled(torch.randn(2, 8)).sum().backward()
    return pages_of(folder)


def test_pages_of_a_model_run_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "parts_of", lambda times: {})  # which lines tell of times depends on the machine's load
    ordinary = dumped(tmp_path / "ordinary", "layer", "norm")
    attacked = dumped(tmp_path / "attacked", SCRIPT.replace(".", ""), IMAGE)
    assert ordinary.keys() == attacked.keys() and len(ordinary) == 2
    for name, text in attacked.items():
        seen, plain = Elements(text), Elements(ordinary[name])
        assert not seen.bad and seen.tags == plain.tags, name
    text = (tmp_path / "attacked/rank0").glob("graph*/index.md")
    assert any("alert" in path.read_text() for path in text)  # the names were there


def graph(names, files=()):
    record = GraphRecord(
        index=0, rank=0, options={}, effective={"target": "cpu", "hardware": f"none: {SCRIPT}", SCRIPT: IMAGE}
    )
    for number, name in enumerate(names):
        report = PassReport(name, rewrites=[Site(SCRIPT, IMAGE, SCRIPT)], skipped=[Skip(SCRIPT, IMAGE, SCRIPT, IMAGE)])
        report.notes = [SCRIPT]
        report.files = dict.fromkeys(files, "text")
        record.runs.append(PassRun(report, "forward", 0.1, 3, 3 + number, SCRIPT, IMAGE))
    record.stages = {"captured": SCRIPT}
    return record


def everything(root):
    return sorted(p.relative_to(root) for p in root.rglob("*") if not p.is_dir())


def test_pages_of_a_record_run_nothing(tmp_path):
    dump.write(graph([SCRIPT]), str(tmp_path))
    for name, text in pages_of(tmp_path).items():
        assert not Elements(text).bad and "<script>alert" not in text and "<img" not in text, name


@pytest.mark.parametrize("name", PLACES)
def test_files_stay_in_the_folder(tmp_path, name):
    folder = tmp_path / "named"
    try:
        dump.write(graph([name, "family.fine"], files=[name, f"x/{name}.json"]), str(folder))
    except OSError as error:  # too long for the file system
        assert 'option "dump": cannot write to' in str(error) and len(name) > 200
    inside = everything(folder)
    assert all(len(p.parts) <= 3 for p in inside) and all(p.parts[0] == "named" for p in everything(tmp_path))
    if len(name) < 200:
        assert len(inside) >= 10 and all("\0" not in str(p) for p in inside)
        # All of them are known as this dump's, and go with it.
        dump.clear(str(folder), 0)
        assert all(p.name in ("index.md", "index.html") for p in everything(folder))


def test_names_of_passes_are_no_paths():
    for name in PLACES[:-1]:
        with pytest.raises(base.PassError, match="is not"):
            register(f"mine.{name}", stage="captured")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "rank0").symlink_to(outside)
    with pytest.raises(OSError, match="is a link to a place outside of it"):
        dump.write(graph(["family.fine"]), str(tmp_path / "named"))
    assert everything(outside) == []


def test_files_that_are_links_are_replaced_not_written_through(tmp_path):
    folder = dump.write(graph(["family.fine"]), str(tmp_path / "named"))
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / "index.md").unlink()
    (folder / "index.md").symlink_to(victim)
    dump.write(graph(["family.fine"]), str(tmp_path / "named"))
    assert victim.read_text() == "mine" and not (folder / "index.md").is_symlink()


@pytest.mark.parametrize("name", [n for n in PLACES if "." not in n])
def test_dumped_tensors_have_numbers_for_names(tmp_path, name):
    made = nn.Sequential()
    made.add_module(name, nn.Linear(2, 2))
    with dump_tensors(made, tmp_path / "named", prefix="../"):
        made(torch.ones(1, 2)).sum().backward()
    assert {re.sub(r"\d+", "N", p.name) for p in everything(tmp_path)} == {"N.pt", "index.jsonl"}
    shutil.copytree(tmp_path / "named", tmp_path / "copy")
    assert not any(d.is_beyond for d in compare_dumps(tmp_path / "named", tmp_path / "copy"))


def test_names_of_devices_are_no_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("MINDSPEED_FX_HARDWARE", str(tmp_path))
    for name in (*PLACES[:5], SCRIPT):
        assert calibrated.path_of("cpu", name).resolve().parent == tmp_path


def test_pictures_and_tables_escape():
    drawn = svg.picture(1, 1, [svg.text(0, 0, SCRIPT), svg.rect(0, 0, 1, 1, IMAGE, IMAGE)], IMAGE)
    section = Section("a", SCRIPT).text(SCRIPT).head(IMAGE).table([SCRIPT], [[IMAGE]]).code(IMAGE, SCRIPT)
    text = sections_page(SCRIPT, [IMAGE], [(SCRIPT, IMAGE)], [section.picture(drawn)])
    assert not Elements(text).bad and "<script>alert" not in text


def test_a_plan_is_drawn_without_running_its_names(tmp_path, ranks):
    from mindspeed_fx.planning.search.search_svg import picture as plan_page

    torch.manual_seed(0)
    with torch.device("meta"):
        made = nn.Sequential()
        for name in (IMAGE, SCRIPT):
            made.add_module(name, nn.Linear(8, 8))
    plan = mindspeed_fx.plan(made, (torch.empty(4, 8, device="meta"),), hardware="ascend910b2", devices=2)
    assert not Elements(plan_page(plan)).bad and "<script>alert" not in plan_page(plan)


def test_the_scripts_of_pages_make_no_elements_of_text():
    """What they draw of a model is text; the one piece of HTML has colours of their own table."""
    folder = os.path.join(os.path.dirname(dump.__file__), "templates")
    lines = [
        line.strip()
        for file in ("graph.js", "page.js", "tree.js", "code.js", "charts.js", "timeline.js", "views.js")
        for line in open(os.path.join(folder, file))
        if re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.html\(", line)
    ]
    assert len(lines) == 1 and set(re.findall(r"\$\{(\w+)\}", lines[0])) == {"colour"}, lines
