"""The HTML page of a graph: its values, and the page itself in a browser where chromium and selenium are installed."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re
import time

import pytest
import torch

from mindspeed_fx.report.answers.ask import QUESTIONS
from mindspeed_fx.report.html import Section, index_page, sections_page, table
from tests.models import Llama, explain, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch._dynamo.reset()
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("dump")
    explain(Llama(), *tokens(), hardware="cpu").save(str(root))
    return root / "rank0" / "graph0"


class Balanced(html.parser.HTMLParser):
    void = {"meta", "br", "input", "link"}

    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def values_of(page):
    packed = re.search(r'id="data">([^<]*)<', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_a_page_is_self_contained_and_has_the_values_of_its_views(folder):
    page = (folder / "report.html").read_text()
    parser = Balanced()
    parser.feed(page)
    assert (
        parser.open == []
        and parser.links == ["../../index.html#ranks"]
        and 'name="viewport"' in page
        and "fusion.swiglu" in page
    )
    values = values_of(page)
    names = values["names"]
    kernels = [(names[op], names[module]) for _, op, module, *_ in values["kernels"]["forward"]]
    assert ("mindspeed.swiglu", "blocks.1") in kernels and set(values["kernels"]) == {"captured", "forward", "backward"}
    assert values["roofs"]["peaks"] and values["memory"]["live"]
    swiglu = next(p for p in values["passes"] if p["name"] == "fusion.swiglu")
    assert [names[module] for _, module, _ in swiglu["sites"]] == ["blocks.0", "blocks.1"] and swiglu["diff"]
    assert len(page) < 3_000_000


def test_text_of_a_model_is_escaped():
    drawn = table(["a"], [["<b>&"]])
    assert "&lt;b&gt;&amp;" in drawn and "<b>&" not in drawn


def rank(number, count):
    """Metadata of the first graph of a rank."""
    return {
        "rank": number,
        "index": 0,
        "counts": {"a": count, "b": 1},
        "runs": [],
        "effective": {},
        "modelled": [],
        "lowered": [],
        "memory": None,
        "step": None,
    }


def test_ranks_that_differ_are_named():
    rows = [rank(0, 2), rank(1, 2), rank(2, 0)]
    page = index_page([(f"rank{n}/graph0", row) for n, row in enumerate(rows)])
    assert '<td>rewrites of a</td><td>2</td><td>2</td><td class="different">≠ 0</td>' in page
    assert 'href="rank2/graph0/report.html"' in page and "rank 2 differs in 1 thing of" in page
    assert "nothing: rank 0 does what most of the other 2 do" in page
    assert "<code>rewrites of b</code>" in page.partition("things are alike on all ranks")[2]
    same = index_page([("rank0/graph0", rank(0, 2)), ("rank1/graph0", rank(1, 2))])
    assert "Nothing: all 2 ranks agree in" in same and "≠" not in same
    assert "One rank wrote this dump" in index_page([("rank0/graph0", rank(0, 2))])


VIEWS = ["questions", "model", "timeline", "roofline", "memory", "graph", "passes", "numbers"]


def opened(browser, folder, width):
    browser.set_window_size(width, 900)
    browser.get(f"file://{folder}/report.html")
    until = time.time() + 20
    while browser.execute_script("return document.documentElement.dataset.ready") != "yes":
        assert time.time() < until, browser.get_log("browser")
        time.sleep(0.02)


@pytest.mark.parametrize("width", [1400, 800, 400])
def test_every_view_draws_without_errors_and_fits(browser, folder, width):
    opened(browser, folder, width)
    views = browser.execute_script("return [...document.querySelectorAll('#views button')].map(b => b.dataset.view)")
    assert views == VIEWS
    for view in views:
        drawn = browser.execute_script(
            f"""document.querySelector('#views button[data-view={view}]').click();
            return [document.documentElement.scrollWidth - innerWidth,
                    document.querySelector('#view-{view}').getBoundingClientRect().height]"""
        )
        assert drawn[0] <= 0 and drawn[1] > 100, (view, drawn)
    assert browser.get_log("browser") == []


def test_the_tree_sums_what_the_kernels_have(browser, folder):
    opened(browser, folder, 1400)
    rows = browser.execute_script(
        """document.querySelector('#views button[data-view=model]').click();
        return new Promise((done) => setTimeout(() => done([...document.querySelectorAll('#tree tbody tr')]
        .map(r => [...r.cells].map(c => c.textContent))), 100))"""
    )
    values = values_of((folder / "report.html").read_text())
    for column, stage in ((1, "captured"), (2, "forward"), (3, "backward")):
        total = sum(k[3] for k in values["kernels"][stage])
        assert float(rows[0][column].replace(",", "")) == pytest.approx(total, abs=0.06)
    assert any(row[0].endswith("blocks") for row in rows)
    browser.execute_script("document.getElementById('fold').click()")
    found = "document.getElementById('find-module')"
    browser.execute_script(f"{found}.value = 'blocks.1'; {found}.dispatchEvent(new Event('input'))")
    time.sleep(0.1)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#tree tbody tr')].map(r => r.cells[0].textContent)"
    )
    assert any(r.endswith("1") for r in rows) and not any(r.endswith("0") for r in rows)


def test_code_put_together_from_differences_is_that_of_the_dump(browser, folder):
    opened(browser, folder, 1400)
    texts = browser.execute_async_script(
        "const done = arguments[0]; unpacked().then((d) => done(graphTexts(d).map((t) => [t.label, t.code()])))"
    )
    files = {
        f"{stem}: {side}": p for side in ("before", "after") for p in folder.glob(f"*.{side}.py") for stem in [p.name]
    }
    compared = 0
    for label, text in texts:
        if label.startswith("final: "):
            continue
        number, side = label[:2], label.rpartition(": ")[2]
        path = next(p for p in files.values() if p.name.startswith(f"{number}.") and p.name.endswith(f".{side}.py"))
        assert text.rstrip("\n") == path.read_text().rstrip("\n"), label
        compared += 1
    assert compared >= 8


def test_a_node_of_the_graph_shows_its_lines(browser, folder):
    opened(browser, folder, 1400)
    browser.execute_script("document.querySelector('#views button[data-view=graph]').click()")
    note = browser.execute_script(
        """const nodes = [...document.querySelectorAll('#graph .node')];
        const node = nodes.find(n => n.textContent.includes('mindspeed.attention'));
        node.dispatchEvent(new Event('focus')); return document.getElementById('graph-node').textContent"""
    )
    assert "mindspeed.attention" in note and "blocks.0" in note and "models.py" in note
    edges = browser.execute_script("return document.querySelectorAll('#graph g > path').length")
    assert edges > 10


def test_passes_are_found_and_show_their_difference(browser, folder):
    opened(browser, folder, 1400)
    shown = browser.execute_script(
        """document.querySelector('#views button[data-view=passes]').click();
        const find = document.getElementById('find-pass');
        find.value = 'swiglu_default'; find.dispatchEvent(new Event('input'));
        const boxes = [...document.querySelectorAll('details.pass')].filter(b => !b.hidden);
        boxes.forEach(b => { b.open = true; });
        return boxes.map(b => b.textContent)"""
    )
    time.sleep(0.2)
    added = browser.execute_script("return document.querySelectorAll('details.pass:not([hidden]) .row.add').length")
    assert shown and all("fusion.rope " not in text for text in shown) and added >= 2


def clicked(browser, selector):
    """Click as a user does: scrolled to, and only if it can be hit."""
    element = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


@pytest.mark.parametrize("width", [1400, 400])
def test_every_question_is_answered_in_two_clicks(browser, folder, width):
    opened(browser, folder, width)
    shown = "return document.querySelector('details.answer[data-question={}] > div').innerText"
    for question in QUESTIONS:
        clicked(browser, f"details.answer[data-question={question.name}] summary")
        text = browser.execute_script(shown.format(question.name))
        assert len(text) > 20 or question.name == "node", (question.name, text)
    browser.execute_script("document.getElementById('find-node').scrollIntoView({block: 'center'})")
    browser.find_element("id", "find-node").send_keys("swiglu_default")
    assert "fusion.swiglu" in browser.execute_script(shown.format("node"))
    fits = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert fits <= 0 and browser.get_log("browser") == []
    clicked(browser, "details.answer[data-question=peak] [data-go=memory]")
    assert browser.execute_script("return !document.getElementById('view-memory').hidden")
    opened(browser, folder, width)
    clicked(browser, "details.answer[data-question=rank] summary")
    clicked(browser, "details.answer[data-question=rank] a")
    assert browser.execute_script("return document.getElementById('ranks').innerText").startswith(
        "What do the ranks do"
    )


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """The folder of a graph with collectives, one of which is exposed."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def step(x, w):
        y = all_reduce(x @ w, "sum", dist.group.WORLD)
        z = (x @ w).relu()
        return (y @ w + z).sum()

    root = tmp_path_factory.mktemp("sent")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        torch._dynamo.reset()
        inputs = torch.randn(256, 256), torch.randn(256, 256)
        explain(step, *inputs, hardware="ascend910b2", disable=["overlap.decompose"]).save(str(root))
    finally:
        dist.destroy_process_group()
    return root / "rank0" / "graph0"


@pytest.mark.parametrize("width", [1400, 800, 400])
def test_the_time_line_shows_what_is_exposed(browser, sent, width):
    opened(browser, sent, width)
    values = json.loads((sent / "metadata.json").read_text())["step"]
    bare = [s for s in values["collectives"] if s["exposed"] > 0]
    assert bare and values["exposed_seconds"] == pytest.approx(values["seconds"] - values["compute_seconds"])
    clicked(browser, "#views button[data-view=timeline]")
    text = browser.execute_script("return document.getElementById('view-timeline').innerText")
    assert f"{len(bare)} of {len(values['collectives'])} collectives exposed" in text and bare[0]["name"] in text
    assert f"{bare[0]['exposed'] * 1e6:.1f}" in text and "R all_reduce" in text and "! stands still" in text
    drawn = """return [document.querySelectorAll('#lanes rect.block').length,
        document.querySelector('#lanes').innerHTML]"""
    before = browser.execute_script(drawn)
    browser.find_element("id", "lanes").send_keys("+" * 4)
    assert before[0] >= 4 and browser.execute_script(drawn)[1] != before[1]
    browser.find_element("id", "lanes").send_keys("n")
    note = browser.execute_script("return document.querySelector('#timeline pre').textContent")
    assert "EXPOSED" in note and bare[0]["name"] in note
    clicked(browser, "#exposed button")
    fits = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert fits <= 0 and browser.get_log("browser") == []


@pytest.mark.parametrize("width", [1400, 800, 400])
def test_the_index_of_ranks_fits_and_opens(browser, tmp_path, width):
    rows = [(f"rank{n}/graph0", rank(n, 2 if n != 3 else 5)) for n in range(8)]
    (tmp_path / "index.html").write_text(index_page(rows))
    browser.set_window_size(width, 900)
    browser.get(f"file://{tmp_path}/index.html")
    clicked(browser, "details[data-rank='3'] summary")
    text = browser.execute_script("return document.querySelector('details[data-rank=\"3\"]').innerText")
    assert "rank 3 differs in 1 thing" in text and "rewrites of a" in text
    fits = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert fits <= 0 and browser.get_log("browser") == []


@pytest.mark.parametrize("width", [1400, 400])
def test_pages_of_sections_show_one_at_a_time(browser, tmp_path, width):
    sections = [Section("a", "First").text("one"), Section("b", "Second").table(["x"], [["two"]]).code("Code", "three")]
    (tmp_path / "page.html").write_text(sections_page("A plan", ["Modelled."], [("ranks", 8)], sections))
    browser.set_window_size(width, 900)
    browser.get(f"file://{tmp_path}/page.html")
    clicked(browser, "#views button[data-view=b]")
    shown = browser.execute_script("return [...document.querySelectorAll('section')].map((s) => !s.hidden)")
    assert shown == [False, True] and browser.get_log("browser") == []
