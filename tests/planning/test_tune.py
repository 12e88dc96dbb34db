"""``mindspeed-fx tune``: what it suggests of launch scripts, in text and arguments, and that it trains."""

import dataclasses
import json
import shlex

import pytest

from mindspeed_fx import cli
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.megatron import flags
from mindspeed_fx.planning.predict import settings_from_flags
from mindspeed_fx.planning.tune import search
from mindspeed_fx.planning.tune.launch import SWAPS, read_launch
from mindspeed_fx.planning.tune.words import changed_flags, with_flag, without_flag
from tests.megatron.launch import shrink

SCRIPTS = {s.name: s for s in shrink.scripts("mindspeed_llm")}
DENSE, EXPERTS = "qwen3__pretrain_qwen3_8b_4K_ptd", "ling_v2__pretrain_ling_mini_16b_4k_ptd_A3"


def refused(words):
    return {a.flag for a in flags.explain(words) if a.is_refused}


def groups(words):
    """Every flag with its values, in order."""
    return [text.split() for text in " ".join(words).replace(" --", "\n--").split("\n")]


@pytest.mark.parametrize("name", ["seed_oss__pretrain_seed_oss_36b_ptd_2k_A3", EXPERTS])
def test_what_is_suggested_of_a_script(name, capsys):
    script = SCRIPTS[name]
    assert cli.main(["tune", "--devices", str(script.world), "--", *script.args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli.main(["tune", "--devices", str(script.world), "--json", "--", *script.args]) == 0
    result = json.loads(capsys.readouterr().out)
    words = result["arguments"]
    assert shlex.split(lines[-1]) == words
    assert refused(words) <= refused(script.args)
    changed = {g[0] for g in result["changed"]} | set(result["removed"])
    assert changed
    keeps = [g for g in groups(script.args) if g[0] not in changed]
    assert [g for g in groups(words) if g[0] not in changed] == keeps
    assert any(line.startswith("as it is   step") for line in lines) and lines[2].startswith("suggested  step")
    fastest, own = result["suggested"], result["as_it_is"]
    assert fastest["memory"] <= 0.9 * hardware("ascend910b2").memory
    assert fastest["interval"][0] < fastest["seconds"] < fastest["interval"][1]
    assert fastest["seconds"] < own["seconds"]
    assert len(result["reasons"]) >= 2 and all(" -> " in reason for reason in result["reasons"])
    again = search.tune(words, script.world)  # read back from the words alone
    assert again.as_it_is.seconds == pytest.approx(fastest["seconds"], rel=1e-9)
    assert again.best.seconds >= again.as_it_is.seconds / 1.03


def test_words_of_every_candidate_are_read_back_as_it():
    script = SCRIPTS[EXPERTS]
    launch = read_launch(script.args, script.world)
    model = search._Model(launch.model, hardware("ascend910b2"), 60e9)
    runs = list(search._candidates(launch, model))
    assert len(runs) > 50 and len({r.pp for r in runs}) > 1 and any(r.vpp > 1 for r in runs)
    for run in runs[::5]:
        back = settings_from_flags(launch.words_of(run), script.world)
        names = ("tp", "pp", "vpp", "cp", "ep", "expert_tp", "microbatch", "zero", "overlap_parameters", "recompute")
        assert [getattr(back, n) for n in names] == [getattr(run, n) for n in names]


def test_what_is_fixed_stays():
    script = SCRIPTS[DENSE]
    tuned = search.tune(script.args, script.world, fixed=["tp", "pp", "microbatch", "vpp", "ep", "cp"])
    names = ("tp", "pp", "vpp", "microbatch")
    own = tuned.launch.settings
    assert [getattr(tuned.best.settings, n) for n in names] == [getattr(own, n) for n in names]
    packed = search.read_launch([*script.args, "--noop-layers", "35", "--reset-attention-mask"], script.world)
    assert packed.held == {"pp": "--noop-layers", "vpp": "--noop-layers", "cp": "--reset-attention-mask"}


def test_layers_are_recomputed_where_memory_is_short():
    script = SCRIPTS[DENSE]
    tuned = search.tune(script.args, script.world, memory="40GiB", fixed=["tp", "pp", "microbatch", "swap"])
    assert not tuned.fits and tuned.best.memory.peak <= 40 * 2**30
    count = tuned.best.settings.recompute_layers
    assert count and tuned.words[tuned.words.index("--recompute-num-layers") + 1] == str(count)


@pytest.mark.parametrize("kind, faster, part", [("none", 1, 0.9), ("optimizer", 1, 0.75), ("attention", 100, 0.9)])
def test_what_waits_in_host_memory_where_that_is_faster(kind, faster, part):
    """A little is made again; behind a link as fast as memory attention is moved; where memory is shorter, states of
    the optimizer, which --reuse-fp32-param keeps on the device.
    """
    script, own = SCRIPTS[DENSE], hardware("ascend910b2")
    words = [w for w in script.args if w != "--reuse-fp32-param" or kind == "attention"]
    link = type(own.host_bandwidth)(own.host_bandwidth * faster, "B/s", "of the test", "low")
    own = dataclasses.replace(own, host_bandwidth=link)
    fixed = ["tp", "pp", "vpp", "cp", "ep", "microbatch", "zero", "overlap"]
    launch = read_launch(words, script.world)
    memory = int(search.peak_memory(launch.model, launch.settings, own.target).peak * part)
    tuned = search.tune(words, script.world, own, memory, fixed)
    assert [k for k, flag in SWAPS.items() if flag in tuned.words] == [kind] * (kind != "none")
    assert settings_from_flags(tuned.words, script.world).offload == tuned.best.settings.offload == kind
    assert any(r.startswith(f"offload none -> {kind}: ") for r in tuned.reasons) == (kind != "none")
    if kind != "none":
        kept = search.tune(words, script.world, own, memory, [*fixed, "swap"])
        assert kept.best.settings.offload == "none" and kept.best.seconds > tuned.best.seconds


def test_a_launch_whose_flags_refuse_all_that_fits_is_an_error():
    """Its norms want all heads on one rank, and with one rank for them nothing fits."""
    script = SCRIPTS["minimax27__pretrain_minimax27_229b_4K_A3_ptd"]
    with pytest.raises(OptionError, match="needs 57.9 GiB, 57.6 fit, and settings that fit are refused by --spec"):
        search.tune(script.args, script.world)


SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 8".split()


@pytest.mark.parametrize(
    "own, words, text",
    [
        (["--devices", "8"], [], "no arguments of a launch script"),
        (["--devices", "8"], SMALL[2:], "has no --num-layers"),
        (["--devices", "8"], SMALL[:-2], "has no --global-batch-size"),
        (["--devices", "8"], [*SMALL, "--micro-batch-size", "two"], "--micro-batch-size is 'two'"),
        (["--devices", "6"], [*SMALL, "--tensor-model-parallel-size", "4"], "does not divide 6 devices"),
        (["--devices", "0"], SMALL, "--devices 0"),
        (["--devices", "8", "--hardware", "ascend910b7"], SMALL, "ascend910b"),
        (["--devices", "8", "--memory", "much"], SMALL, "memory"),
        (["--devices", "8", "--memory", "2MiB"], SMALL, "settings fits in 0.0 GiB"),
        (["--devices", "8", "--fix", "tpp"], SMALL, "did you mean"),
    ],
)
def test_bad_input_is_one_error(own, words, text, capsys):
    assert cli.main(["tune", *own, "--", *words]) == 2
    error = capsys.readouterr().err
    assert text in error and error.startswith("mindspeed-fx tune: ") and error.count("\n") == 1


def test_words_are_edited_in_place():
    words = ["--a", "1", "2", "--b=3", "--c"]
    assert with_flag(words, "--b", "4") == ["--a", "1", "2", "--b=4", "--c"]
    assert with_flag(words, "--a", "5") == ["--a", "5", "--b=3", "--c"]
    assert with_flag(words, "--d", None) == [*words, "--d"] and with_flag(words, "--c", None) == words
    assert without_flag(words, "--a") == ["--b=3", "--c"]
    assert changed_flags(words, ["--b", "3", "--c", "--a", "1"]) == ([["--a", "1"]], [])


def test_reading_raises_an_option_error():
    with pytest.raises(OptionError, match="--num-layers"):
        read_launch(["--seq-length", "8", "--global-batch-size", "8"], 8)


SUGGESTED = {
    ("qwen3__pretrain_qwen3_4b_4K_ptd", 8): "dense",
    ("ling_v2__pretrain_ling_mini_16b_4k_ptd_A3", 16): "experts",
    ("llama2__pretrain_llama2_13b_pack_ptd", 16): "packed documents",
    ("deepseek2_lite__pretrain_deepseek2_lite_16b_ptd_16p", 16): "latent attention and experts",
}
"""Launch script and devices -> what it is about."""


@pytest.mark.slow
@pytest.mark.parametrize("name, devices", SUGGESTED)
def test_a_suggestion_trains(name, devices):
    """The changed arguments, shrunk, over gloo, with the launch scripts' runner: compiled as eager."""
    from tests.megatron.launch import table

    script = SCRIPTS[name]
    tuned = search.tune(script.args, devices)
    assert tuned.is_changed
    row = table.measure(shrink.Script(script.name, script.entry, devices, tuned.words))
    assert row.passes and not row.refused, row


def test_a_suggestion_runs():
    """The small sibling: one run, compiled."""
    from tests.megatron.launch import runner, table

    name, devices = next(iter(SUGGESTED))
    tuned = search.tune(SCRIPTS[name].args, devices)
    args, world = shrink.shrink(shrink.Script(name, SCRIPTS[name].entry, devices, tuned.words), "fp32")
    run = runner.run(args, world, environ=table.COMPILED)
    assert tuned.is_changed and run.error is None, run.error
    assert len(run.losses) == 3 and run.graphs == run.chunks and not run.breaks
