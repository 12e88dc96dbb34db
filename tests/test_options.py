import json

import pytest
import torch

from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.passes.runner import Pipeline


@pytest.mark.parametrize(
    "given, words",
    [
        ({"levl": 1}, ['"levl"', 'did you mean "level"', "memory_budget"]),
        ({"level": 3}, ['"level" is 3', "0, 1, 2"]),
        ({"level": True}, ['"level" is True']),
        ({"target": "gpu"}, ['"gpu"', '"cpu"', '"cuda"', '"npu"']),
        ({"codegen": "indcutor"}, ['did you mean "inductor"']),
        ({"check": True}, ['"check"']),
        ({"enable": "fusion.rope"}, ['"enable" takes a list']),
        ({"memory_budget": 0}, ["(0, 1]"]),
        ({"memory_budget": "24 gigs"}, ["24 gigs", '"24GiB"', "(0, 1]", '"min"']),
        ({"memory_budget": "max"}, ["max", '"min"']),
        ({"memory_budget": True}, ["True", "(0, 1]"]),
        ({"strict": "yes"}, ['"strict" takes True or False']),
        ({"inductor": {"max_autotun": True}}, ['"max_autotun"', 'did you mean "max_autotune"']),
        ({"inductor": {"max_autotune": "maybe"}}, ["max_autotune = \"maybe\"", "True or False"]),
        ({"enable": None}, ['"enable" takes a list', "None"]),
        ({"level": 1.0}, ['"level" is 1.0', "valid: 0, 1, 2"]),
        ({"level": "1"}, ['"level" is "1"; valid: 0, 1, 2']),
        ({"dump": ""}, ['"dump" takes a directory']),
        ({"certify": 1, "memory_budget": 0.5}, ['"certify" takes True or False', "1"]),
        ({"certify": True}, ['"certify" is True', '"memory_budget" is None']),
    ],
)  # fmt: skip
def test_bad_option_names_option_value_and_valid_ones(given, words):
    with pytest.raises(OptionError) as e:
        Options.parse(given, {})
    for word in words:
        assert word.strip("'") in str(e.value).replace("'", '"'), str(e.value)


def test_unknown_pass_names_the_nearest():
    for option in ("enable", "disable"):
        with pytest.raises(OptionError, match='did you mean "fusion.rms_norm"'):
            Pipeline(Options(**{option: ["fusion.rmsnorm"]}))
    with pytest.raises(OptionError, match=r'names no pass: "fuson\.\*"'):
        Pipeline(Options(disable=["fuson.*"]))


def test_environment_fills_in_and_the_call_wins():
    env = {"MINDSPEED_FX_OPTIONS": json.dumps({"level": 0, "codegen": "eager"}), "MINDSPEED_FX_DUMP": "somewhere"}
    options = Options.parse({"level": 1}, env)
    assert (options.level, options.codegen, options.dump) == (1, "eager", "somewhere")


@pytest.mark.parametrize("text", ["{", "[1]", '{"lvl": 1}'])
def test_bad_environment_is_an_error(text):
    with pytest.raises(OptionError, match="MINDSPEED_FX_OPTIONS"):
        Options.parse({}, {"MINDSPEED_FX_OPTIONS": text})


def test_auto_resolves_by_device():
    assert Options().resolve("cpu").codegen == "inductor"
    assert Options().resolve("npu").codegen == "eager"
    assert Options(codegen="inductor").resolve("npu").codegen == "inductor"


def test_levels_and_globs_select_passes():
    def names(**o):
        return {p.name for p in Pipeline(Options(**o)).passes}

    assert not any(n.startswith("fusion.") for n in names(level=0))
    assert {"fusion.rope", "fusion.attention"} <= names(level=1)
    assert names(level=2, disable=["fusion.*"]).isdisjoint({"fusion.rope", "fusion.attention"})
    assert names(level=0, enable=["fusion.rop*"]) - names(level=0) == {"fusion.rope"}


def test_the_error_reaches_the_user_of_torch_compile():
    with pytest.raises(Exception, match='did you mean "level"'):
        torch.compile(lambda x: x + 1, backend="mindspeed", options={"lebel": 1})(torch.ones(2))
    with pytest.raises(Exception, match='mode="?.?max-autotune'):
        torch.compile(lambda x: x + 1, backend="mindspeed", mode="max-autotune")(torch.ones(2))
