"""A step of a parallelized model that one job compiled and the next one loads, each rank its own file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mindspeed_fx
from mindspeed_fx.compat import ahead
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning import saved_parts
from mindspeed_fx.sharding.local_call import LocalCall, Outside
from mindspeed_fx.sharding.registry import Sharding
from tests import ranks
from tests.planning import saved_ranks
from tests.sharding.llama import Llama

pytestmark = pytest.mark.skipif(bool(ahead.problem()), reason="this torch writes no compiled functions")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "plan", "inputs", "dynamic", "kind"),
    [
        ({"tp": 2}, "tp_sp", "whole", None, Llama),
        ({"tp": 2}, "tp", "whole", None, saved_ranks.Dropped),
        ({"dp": 2}, "zero2", "local", None, Llama),
        ({"dp": 2}, "zero3", "whole", True, Llama),
        ({"cp": 2}, "ulysses", "whole", None, Llama),
        ({"cp": 2}, "ring", "whole", None, Llama),
        ({"dp": 2, "tp": 2}, "zero3+tp_sp", "whole", None, Llama),
    ],
)
def test_another_job_runs_it_without_compiling(sizes, plan, inputs, dynamic, kind, tmp_path):
    """Bitwise what the compiled step gives; its process groups have other names, and its caches are empty."""
    count = 2 * len(sizes)
    for worker in (saved_ranks.save_worker, saved_ranks.load_worker):
        ranks.spawn(worker, (str(tmp_path), sizes, plan, inputs, dynamic, kind), nprocs=count)
    for rank in range(count):
        loaded = json.loads(Path(tmp_path, f"loaded{rank}.json").read_text())
        nothing = {"frames": 0, "graphs": 0, "traced": 0}
        assert loaded == {"reason": None, "misses": [], "counts": nothing}


def test_files_for_another_rank_plan_mesh_or_model_are_refused_by_name(tmp_path):
    ranks.spawn(saved_ranks.refusals_worker, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        reasons = json.loads(Path(tmp_path, f"reasons{rank}.json").read_text())
        assert reasons["rank"] == f"rank was {1 - rank} and is {rank}"
        assert reasons["plan"] == reasons["argument"] == 'plan "mine" has other contents than when the file was made'
        assert reasons["mesh"].startswith("mesh was cpu [0, 1] ('tp',)") and "('dp', 'tp')" in reasons["mesh"]
        assert reasons["whole"] == 'the model was divided by plan "mine" and is whole'
        assert reasons["missing"] == "there is no such file"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = mindspeed_fx.load_compiled(saved_ranks.small(whole=True), tmp_path / "small.mfx")
    assert alone.reason == "world size was 2 and is 1"


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    ranks.spawn(saved_ranks.unsaved_worker, (str(tmp_path),), nprocs=2)
    hidden, eager = json.loads(Path(tmp_path, "texts0.json").read_text())
    assert "neither an argument of the step nor a variable that it reads" in hidden
    assert 'option "codegen" is "eager"' in eager
    assert not list(tmp_path.glob("*.mfx*"))


def test_stages_and_groups_without_a_name_are_refused_by_name(tmp_path):
    stage = mindspeed_fx.split_backward(torch.nn.Linear(2, 2))
    with pytest.raises(OptionError, match="a SplitBackward compiles itself"):
        mindspeed_fx.save_compiled(stage, tmp_path / "step.mfx", (torch.ones(2, 2),))
    unnamed = SimpleNamespace(serialize=lambda: None)
    call = LocalCall(Outside(None, {}), SimpleNamespace(sharding=SimpleNamespace(mesh=None)), unnamed, False)
    with pytest.raises(OptionError, match="symmetric memory"):
        saved_parts.as_writable(call)
    with pytest.raises(OptionError, match="functions of this process"):
        saved_parts.as_writable(lambda *args: args)


def test_models_are_found_where_a_step_has_them():
    sharding, model = Sharding(None, None, []), torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].__dict__["_sharding"] = sharding
    trainer = SimpleNamespace(state=SimpleNamespace(model=model), name="run")
    for values in ([model], [{"models": [model, model]}], [trainer], [3, trainer, "text"]):
        assert saved_parts.find_shardings(values) == [sharding]
    assert not saved_parts.find_shardings([torch.ones(2), trainer.name, torch.nn.Linear(2, 2), torch.relu])
