"""What records of a run say, without Megatron's repository."""

import json

from tests.megatron.core_suite import results
from tests.megatron.core_suite.results import Cause, Result


def write_records(folder, ranks, late=False):
    inner = folder / "tests~unit_tests~moe~test_a.py"
    inner.mkdir()
    (inner / "end.json").write_text(json.dumps({"late": late, "seconds": 1.0}))
    for rank, records in enumerate(ranks):
        lines = [json.dumps({"test": f"tests/unit_tests/moe/test_a.py::{name}", **rest}) for name, rest in records]
        (inner / f"{rank}.jsonl").write_text("\n".join(lines))


def phase(outcome, when="call", **rest):
    return {"when": when, "outcome": outcome, **rest}


BEGIN = {"when": "begin"}


def test_the_worst_phase_and_the_worst_rank_count(tmp_path):
    passed = [("one", BEGIN), ("one", phase("passed", "setup")), ("one", phase("passed"))]
    failed = [*passed, ("one", phase("failed", "teardown", text="no"))]
    write_records(tmp_path, [passed, failed])
    assert results.read(tmp_path) == [Result("moe/test_a.py", "one", "failed", "no")]


def test_a_test_that_did_not_end_is_late_or_ended_its_process(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    records = [[("one", BEGIN), ("one", phase("passed")), ("two", BEGIN)]]
    write_records(tmp_path / "a", records, late=True)
    write_records(tmp_path / "b", records)
    assert [r.outcome for r in results.read(tmp_path / "a")] == ["passed", "late"]
    assert [r.outcome for r in results.read(tmp_path / "b")] == ["passed", "failed"]


def test_a_file_without_records_failed(tmp_path):
    write_records(tmp_path, [[]])
    assert [(r.name, r.outcome) for r in results.read(tmp_path)] == [("", "failed")]


def test_a_cause_is_read_from_the_error_and_its_place():
    causes = (Cause("ranks", r"world_size \(\d+\)"), Cause("engine", "None", where="typed_torch"))
    engine = Result("f", "t", "failed", "Expected value to be not None", ("core/typed_torch.py:49",))
    assert results.cause_of(Result("f", "t", "failed", "world_size (1) is not divisible by 8"), causes) == "ranks"
    assert results.cause_of(engine, causes) == "engine"
    elsewhere = Result("f", "t", "failed", "None", ("core/utils.py:1",))
    assert results.cause_of(elsewhere, causes) == results.UNEXPLAINED


def test_words_pass_by_what_refuses_to_be_asked():
    from types import ModuleType

    from mindspeed_fx.megatron.device_words import Words

    class Guarded:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    def where():
        return "cuda"

    module = ModuleType("guarded")
    where.__module__ = "guarded"
    module.guard, module.where = Guarded(), where
    Words("cpu", None).exchange_in_module(module)
    assert where() == "cpu"
