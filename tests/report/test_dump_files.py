"""A dump into the directory of an earlier one: its files go, what is not ours stays."""

import json

import pytest

from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import dump
from mindspeed_fx.report.records import GraphRecord, PassReport, PassRun


def record(index=0, rank=0, passes=("fusion.rms_norm", "fusion.swiglu"), extra=()):
    runs = [PassRun(PassReport(p, files=dict(extra)), "captured", 0.001, 3, 2, "before\n", "after\n") for p in passes]
    return GraphRecord(index, rank, {}, {"target": "cpu", "hardware": None}, runs=runs)


@pytest.fixture
def new_process(monkeypatch):
    """Forgets what this process has written, as a new one would."""

    def begin(ranks=1):
        monkeypatch.setattr(dump, "_begun", set())
        monkeypatch.setattr(dump.distributed, "world_size", lambda: ranks)

    begin()
    return begin


def files(root):
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def test_a_new_dump_replaces_an_old_one_and_nothing_else(tmp_path, new_process):
    for index in range(3):
        dump.write(record(index, extra={"timeline.json": "{}"}), str(tmp_path))
    kept = {"rank0/graph0/00.captured.fusion.rms_norm.mine.py", "rank0/graph2/notes.md", "rank0/mine.txt", "notes.txt"}
    for name in kept:
        (tmp_path / name).write_text("mine")
    new_process()
    dump.write(record(0, passes=("fusion.rope",)), str(tmp_path))
    ours = {
        "00.captured.fusion.rope.before.py",
        "00.captured.fusion.rope.after.py",
        "00.captured.fusion.rope.diff",
        "index.md",
        "report.html",
        "metadata.json",
    }
    assert files(tmp_path) == kept | {f"rank0/graph0/{n}" for n in ours} | {"index.md", "index.html"}
    assert not (tmp_path / "rank0/graph1").exists()
    for index in ("index.md", "index.html"):
        text = (tmp_path / index).read_text()
        assert "rank0/graph0" in text and "graph1" not in text and "graph2" not in text
    assert json.loads((tmp_path / "rank0/graph0/metadata.json").read_text())["files"] == sorted(
        ours - {"metadata.json"}
    )


def test_graphs_of_one_process_stay_and_a_graph_written_again_loses_what_it_no_longer_has(tmp_path, new_process):
    for index in (0, 10, 2):
        dump.write(record(index), str(tmp_path))
    dump.write(record(0, passes=("fusion.rms_norm",)), str(tmp_path))
    names = {p.name for p in (tmp_path / "rank0/graph0").iterdir()}
    assert "00.captured.fusion.rms_norm.diff" in names and not any("swiglu" in n for n in names)
    text = (tmp_path / "index.md").read_text()
    assert text.index("graph0]") < text.index("graph2]") < text.index("graph10]")


def test_each_rank_removes_its_own_and_rank_0_what_is_too_many(tmp_path, new_process):
    new_process(4)
    for rank in range(4):
        for index in range(2):
            dump.write(record(index, rank), str(tmp_path))
    new_process(2)
    dump.write(record(0, 1), str(tmp_path))
    assert {p.name for p in tmp_path.glob("rank*")} == {f"rank{r}" for r in range(4)}
    dump.write(record(0, 0), str(tmp_path))
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.glob("rank*/graph*")} == {
        "rank0/graph0",
        "rank1/graph0",
    } and not (tmp_path / "rank3").exists()


def test_saving_a_report_replaces_the_last_one(tmp_path, new_process):
    Report([record(0), record(1)], []).save(str(tmp_path))
    Report([record(0)], []).save(str(tmp_path))
    assert [p.name for p in tmp_path.glob("rank0/*")] == ["graph0"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"files": 3}',
        '{"files": ["../../outside.txt", 5]}',
        '{"files": ["", ".", "..", "../../../outside.txt"]}',
    ],
)
def test_a_list_that_is_not_ours_removes_nothing(tmp_path, new_process, text):
    root = tmp_path / "dump"
    folder = root / "rank0" / "graph7"
    folder.mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("mine")
    (folder / "00.captured.fusion.rope.diff").write_text("mine")
    (folder / "metadata.json").write_text(text)
    dump.write(record(0), str(root))
    assert (
        (tmp_path / "outside.txt").exists() and (folder / "00.captured.fusion.rope.diff").exists() and folder.exists()
    )
