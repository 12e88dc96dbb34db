"""The runner of scenarios, what counts as equal, and some scenarios of libraries that the project's tests have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.scenarios import compare, report, runner, table

USUAL = (
    "torch/hooks/full_backward",
    "torch/checkpoint/selective",
    "torch/retain_graph",
    "torch.func/functional_call",
    "torch.nn/swa/ema",
    "torch.nn/transformer/encoder",
    "torch.optim/whole_step_compiled",
    "tensors/sparse_embedding",
    "tensors/program/in_place_views",
    "tensors/complex/rotation",
)
SLOW = (
    *("transformers/Trainer/accumulation", "transformers/Trainer/ddp_two_ranks", "accelerate/bfloat16"),
    *("transformers/tp_plan_auto/llama", "torch.distributed/fsdp2/llama", "torch.distributed/ddp/compile_outside"),
    *("transformers/generate/static_cache", "transformers/generate/compile_config/llama"),
    *("peft/lora", "trl/sft/plain", "trl/dpo/sigmoid", "torchao/float8_training/tensorwise", "torchtitan/llama3/fsdp2"),
)
"""What a user's script has around the backend (docs/guide/libraries.md)."""

LIBRARIES = {"peft": "peft", "trl": "trl", "torchao": "torchao", "torchtitan": "torchtitan"}


def check(name, folder):
    scenario = table.load()[name]
    runs = runner.Runner(folder, 280)
    row = report.judge(runs, scenario, ["passes"])
    runs.close()
    assert row.equal, f"{row}\n{[r.get('trace') for r in row.records.values()]}"


@pytest.fixture
def default_dtype():
    """Some scenarios are in float64 by default."""
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", USUAL)
def test_equals_eager(name, monkeypatch, default_dtype):
    scenario = table.load()[name]
    values = {}
    for backend in ("eager", "passes"):
        monkeypatch.setenv("MINDSPEED_FX_OPTIONS", "{}")
        torch._dynamo.reset()
        torch.manual_seed(0)
        values[backend] = table.flatten(scenario.function(table.Run(backend), *scenario.args))
    off, where = compare.difference(values["passes"], values["eager"])
    assert off <= 1, where


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equals_eager_around_the_backend(name, tmp_path):
    runner.add_packages()
    library = LIBRARIES.get(name.split("/")[0])
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (make scenarios)")
    check(name, tmp_path)


def test_the_table_is_large_and_every_note_names_a_scenario():
    names = table.load()
    assert len(names) >= 250
    assert not set(report.read_notes()) - set(names) and not {*USUAL, *SLOW} - set(names)


@pytest.fixture
def run_faulty(tmp_path):
    from tests.scenarios import faulty  # noqa: F401  enters its scenarios

    def run(kind, backend, limit=30):
        path = str(tmp_path / f"{kind}.{backend}")
        runner._handle({"name": f"faulty/{kind}", "backend": backend, "path": path, "limit": limit})
        return runner.Runner(tmp_path, limit).record(kind, backend)

    return run


@pytest.mark.parametrize("kind, status", [("raises", "raised"), ("dies", "died"), ("hangs", "late"), ("right", "ok")])
def test_one_that_fails_costs_only_itself(kind, status, run_faulty):
    record = run_faulty(kind, "passes", 2 if kind == "hangs" else 30)
    assert record["status"] == status
    assert kind != "raises" or "on purpose" in record["error"]


def test_a_runner_asks_its_server(tmp_path):
    runs = runner.Runner(tmp_path, 30)
    assert runs.run("faulty/right", "tests.scenarios.faulty", "passes")["status"] == "ok"
    assert runs.values("faulty/right", "passes").keys() == {"x", "y"}
    runs.close()


def test_a_page_keeps_what_is_not_run_again():
    page = Path(__file__).parents[2] / "docs" / "scenarios.md"
    before = report.read_page(page)
    names = (name for name in table.load() if not name.startswith("faulty/"))
    rows = [report.merge(report.Row(name), before.get(name)) for name in names]
    assert report.page(rows) == page.read_text()
    new = report.Row("x", {"eager": "ok", "mindspeed": "equal"}, {"mindspeed": {"graphs": 2}})
    old = report.Row("x", {"eager": "ok", "passes": "differs"}, {"passes": {"graphs": 3}})
    assert report.merge(new, old).results == {"eager": "ok", "passes": "differs", "mindspeed": "equal"}
    assert report.merge(report.Row("x", {"eager": "late"}), old) == old


def test_layers_that_are_read_once_count_as_ours():
    once = report.Row("torch/x", {"eager": "ok", "read_once": "differs"})
    assert once.ran and not once.equal


def test_what_is_equal_with_generated_code_alone_is_not_counted_as_equal_with_it_too():
    row = report.Row("torch/x", {"eager": "ok", "passes": "differs", "mindspeed": "equal"})
    assert "1 ran, 0 of them equal (0 with generated" in report.page([row])


def test_a_wrong_value_is_a_defect_where_inductor_is_right(run_faulty, tmp_path):
    for kind, backends in {"wrong": ("eager", "passes"), "right": ("inductor",)}.items():
        for backend in backends:
            run_faulty(kind, backend)
    for suffix in ("json", "pt"):
        (tmp_path / f"right.inductor.{suffix}").rename(tmp_path / f"wrong.inductor.{suffix}")
    row = report.read(runner.Runner(tmp_path, 30), table.Scenario("wrong", None, ""))
    assert row.defect and not row.equal
    assert row.results["passes"].startswith("differs") and row.results["passes"].endswith("at y")


@pytest.mark.parametrize(
    "change, equal",
    [
        ({}, True),
        ({"gradients.w": torch.full((4,), 1.00001)}, True),
        ({"gradients.w": torch.full((4,), 1.001)}, False),
        ({"gradients.b": torch.tensor([1e-8])}, True),
        ({"gradients.b": torch.tensor([1e-4])}, False),
        ({"ids": torch.tensor([1, 3])}, False),
        ({"gradients.w": torch.full((4,), float("nan"))}, False),
        ({"gradients.w": torch.ones(2, 2)}, False),
        ({"gradients.w": torch.ones(4, dtype=torch.float64)}, False),
        ({"more": torch.ones(1)}, False),
    ],
)
def test_what_is_equal(change, equal):
    eager = {"gradients.w": torch.ones(4), "gradients.b": torch.zeros(1), "ids": torch.tensor([1, 2])}
    assert (compare.difference(eager | change, eager)[0] <= 1) == equal


def test_nothing_is_not_equal():
    assert compare.difference({}, {})[0] > 1
