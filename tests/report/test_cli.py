"""The command line in this process: options of ``explain`` reach a script, broken ones are named, ``doctor`` says all
it knows.
"""

import json
import os
import textwrap

import pytest

from mindspeed_fx import cli
from mindspeed_fx.options import environment
from mindspeed_fx.report import doctor

SCRIPT = """
    import sys, torch
    torch._dynamo.reset()
    own = {"disable": ["fusion.rope"]} if "--own" in sys.argv else {}
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8))
    torch.compile(model, backend="mindspeed", options=own)(torch.randn(2, 8)).sum().backward()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINDSPEED_FX_DUMP", raising=False)


def explained(capsys, *arguments):
    status = cli.main(["explain", *arguments])
    out = capsys.readouterr()
    assert status == 0, out.err
    return json.loads(out.out)


def test_options_reach_a_script_and_its_own_win(script, capsys, monkeypatch):
    monkeypatch.setenv("MINDSPEED_FX_OPTIONS", '{"codegen": "eager", "level": 2}')
    before = dict(os.environ)
    (graph,) = explained(capsys, "train.py", "--json", "--options", '{"disable": ["fusion.rms_norm"], "level": 1}')[
        "graphs"
    ]
    assert graph["counts"].get("fusion.rms_norm", 0) == 0
    assert {k: graph["effective"][k] for k in ("codegen", "level", "disable")} == {
        "codegen": "eager",
        "level": 1,
        "disable": ["fusion.rms_norm"],
    }
    assert dict(os.environ) == before
    (graph,) = explained(
        capsys, "train.py", "--json", "--options", '{"disable": ["fusion.rms_norm"], "level": 1}', "--", "--own"
    )["graphs"]
    assert (
        graph["counts"]["fusion.rms_norm"] == 1
        and graph["effective"]["level"] == 1
        and graph["effective"]["disable"] == ["fusion.rope"]
    )


def test_a_dump_that_is_asked_for_wins_over_the_environment():
    assert environment(
        {"level": 1, "dump": "a"}, {"MINDSPEED_FX_DUMP": "b", "MINDSPEED_FX_OPTIONS": '{"strict": true}'}
    ) == {"MINDSPEED_FX_OPTIONS": '{"strict": true, "level": 1}', "MINDSPEED_FX_DUMP": "a"}
    assert environment({}, {"MINDSPEED_FX_DUMP": "b"}) == {"MINDSPEED_FX_OPTIONS": "{}", "MINDSPEED_FX_DUMP": "b"}


@pytest.mark.parametrize("source", ["train.py", "train.py:make"])
@pytest.mark.parametrize(
    "text, words",
    [
        ('{"level": 1', "--options is not JSON"),
        ("[1]", "--options must be a JSON object"),
        ('{"levl": 1}', 'did you mean "level"'),
    ],
)
def test_broken_options_are_named(script, capsys, monkeypatch, source, text, words):
    with open("train.py", "w") as file:
        file.write("import torch\ndef make():\n    return torch.nn.RMSNorm(8), (torch.randn(2, 8),)\n")
    assert cli.main(["explain", source, "--options", text]) == 2
    assert words in capsys.readouterr().err


def test_cross_names_its_broken_options(capsys):
    assert cli.main(["cross", "model.py:make", "--options", "{level}"]) == 2
    assert "--options is not JSON" in capsys.readouterr().err


def test_doctor_says_in_words_what_it_says_in_json(monkeypatch):
    monkeypatch.setattr(doctor, "compiler_problem", lambda: None)
    found = doctor.examine()
    assert ("npu", "npugraph_ex") in {(t["target"], t["codegen"]) for t in found["targets"]}
    found["megatron_patches"] = ["megatron.core.tensor_parallel.layers.linear: it is captured (everywhere)"]
    text = doctor.text(found)
    for t in found["targets"]:
        assert any(
            line.split()[:2] == [t["target"], t["codegen"]] and (t["reason"] in line) for line in text.splitlines()
        )
    assert found["megatron_patches"][0] in text and found["caches"] in text and found["entry_point"] in text
    assert "mindspeed_fx.megatron_adaptor" in doctor.text({**found, "megatron_patches": []})


def test_inductor_on_npu_needs_triton_ascend(monkeypatch):
    monkeypatch.setattr(doctor, "compiler_problem", lambda: None)
    monkeypatch.setattr(doctor, "npu_problem", lambda: None)
    for installed in (None, "3.2.0"):
        monkeypatch.setattr(doctor, "_version", lambda package: installed if "ascend" in package else "1")
        (row,) = [t for t in doctor.examine()["targets"] if (t["target"], t["codegen"]) == ("npu", "inductor")]
        assert "installed, not tried" in doctor.text(doctor.examine())
        assert row["works"] is (installed is not None) and ("triton-ascend" in row["reason"]) is (installed is None)


def test_npugraph_ex_is_looked_up_in_torch_npu_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "torch_npu" / "npu").mkdir(parents=True)
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert doctor.npu_problem() is None and "no torch.npu.npugraph_ex" in doctor.npugraph_ex_problem()
    (tmp_path / "torch_npu" / "npu" / "npugraph_ex").mkdir()
    assert doctor.npugraph_ex_problem() is None
