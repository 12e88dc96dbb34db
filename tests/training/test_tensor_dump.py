"""Dumps of two runs: the first module that differs is named, and a compiled model's boundary is an eager one's."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mindspeed_fx
from mindspeed_fx import cli
from mindspeed_fx.training.tensor_dump import compare_dumps, compare_tensors


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def dump(folder, model, modules="*", **settings):
    with mindspeed_fx.dump_tensors(model, folder, modules, **settings):
        model(torch.ones(2, 4)).sum().backward()


def test_the_first_module_that_differs_is_named(tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    model = Model()
    dump(a, model)
    assert not model.first._forward_hooks
    dump(tmp_path / "same", Model())
    assert cli.main(["compare-dumps", str(a), str(tmp_path / "same")]) == 0
    assert "6 tensors, none beyond the tolerance" in capsys.readouterr().out
    with torch.no_grad():
        model.second.bias[1] += 0.5
    dump(b, model)
    rows = {d.name: d for d in compare_dumps(a, b)}
    assert rows["rank0 first forward, call 0, output 0"].absolute == 0
    row = rows["rank0 second forward, call 0, output 0"]
    assert row.absolute == pytest.approx(0.5, rel=1e-6) and row.relative > 0 and row.is_beyond
    assert rows["rank0 first gradient, call 0, output 0"].absolute == 0, "the bias changes no gradient"
    assert cli.main(["compare-dumps", str(a), str(b)]) == 1
    assert "first difference: rank0 second forward, call 0, output 0" in capsys.readouterr().out
    assert cli.main(["compare-dumps", str(a), str(b), "--atol", "0.6"]) == 0
    with torch.no_grad():
        model.second.weight *= 2
    dump(tmp_path / "c", model)
    assert {d.name.partition(",")[0] for d in compare_dumps(b, tmp_path / "c") if d.is_beyond} == {
        *("rank0 second forward", "rank0  forward", "rank0 first gradient"),
    }


def test_what_is_on_one_side_alone_differs(tmp_path):
    dump(tmp_path / "a", Model(), "first,second")
    dump(tmp_path / "b", Model(), "sec*")
    (row, other) = [d for d in compare_dumps(tmp_path / "a", tmp_path / "b") if d.is_beyond]
    assert row.name.startswith("rank0 first forward") and row.note == f"not in {tmp_path / 'b'}" and other.is_beyond
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])
    for x, y, beyond in ((nan, nan, False), (nan, zero, True), (zero, nan, True), (1 / zero, 1 / zero, False)):
        assert compare_tensors("t", x, y, 1e-5, 1e-8).is_beyond is beyond


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_runs_eager_or_shows_its_boundary(tmp_path, in_place):
    torch._dynamo.reset()
    model = Model()
    options = {"codegen": "eager"}
    if in_place:
        model.compile(backend="mindspeed", fullgraph=True, options=options)
    compiled = model if in_place else torch.compile(model, backend="mindspeed", fullgraph=True, options=options)
    torch._dynamo.utils.counters.clear()
    with pytest.warns(UserWarning, match="runs eager meanwhile"):
        dump(tmp_path / "eager", compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="tensors are dumped")
        dump(tmp_path / "compiled", compiled, "", compiled=True)
        compiled(torch.ones(2, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    rows = compare_dumps(tmp_path / "eager", tmp_path / "compiled")
    assert [d.name for d in rows if not d.note] == [f"rank0  {k}, call 0, output 0" for k in ("forward", "gradient")]
    assert all(d.absolute <= 1e-6 for d in rows if not d.note) and sum(bool(d.note) for d in rows) == 4
    with pytest.raises(ValueError, match="no compiled module has such a name"):
        dump(tmp_path / "c", compiled, "first", compiled=True)


def test_what_cannot_be_dumped_or_compared_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="modules is 'third': no module has such a name"):
        dump(tmp_path, Model(), "third")
    dump(tmp_path, Model())
    with pytest.raises(FileExistsError, match="has a dump of 'first'"):
        dump(tmp_path, Model())
    assert cli.main(["compare-dumps", str(tmp_path), str(tmp_path / "nowhere")]) == 2
    assert "holds no dump of tensors" in capsys.readouterr().err
