"""Every flag does what its row says: Megatron's arguments, the backend's options, a line, or an error."""

from __future__ import annotations

import re

import pytest

from mindspeed_fx.megatron import flags
from mindspeed_fx.megatron.flags.account import account
from tests.megatron.flags import deepseek4_runs
from tests.megatron.flags.effects import EFFECTS
from tests.megatron.flags.flag_rows import OWN, REFUSED, SETTINGS
from tests.megatron.flags.layer_effects import EXPERTS, MODEL
from tests.megatron.flags.model_effects import MODEL_EFFECTS, MORE_RUNS, SPARSE_MODEL
from tests.megatron.flags.parallel_effects import LAYERZERO, PARALLEL, TWO_DIMENSIONS, V_SHAPE
from tests.megatron.flags.words import MEGATRON, parse

RUNS = {
    "--position-embedding-type alibi": "--position-embedding-type=alibi",
    **{words.partition("=")[0]: words for block in REFUSED.values() for words in block.split()},
}
"""A run of each flag that has settings."""
RUNS |= {
    "--profile": "--profile",
    "--layerzero": LAYERZERO,
    "--tp-2d": f"--tp-2d {TWO_DIMENSIONS}",
    "--schedules-method": f"--schedules-method=dualpipev {V_SHAPE}",
    "--moe-model-type": "--moe-model-type=deepspeed_moe --num-experts=4",
    "--use-pipe-experts": "--use-pipe-experts --sequence-parallel",
    "--ampipe-degree": "--ampipe-degree=2 --moe-model-type=deepspeed_moe --num-experts=4",
    "--disable-gloo-group": "--disable-gloo-group",
    "--balanced-moe-experts": "--balanced-moe-experts",
    "--enable-expert-placement": "--enable-expert-placement",
    "--full-attention-interval": "--full-attention-interval=2 --swiglu",
    "--kv-compress": "--kv-compress",
    "--enable-mhc": "--enable-mhc",
    "--enable-dsa-indexer": f"--enable-dsa-indexer {SPARSE_MODEL}",
    "--rope-scaling-type": "--rope-scaling-type=longrope",
    "--moe-adaptive-recompute-activation": "--moe-adaptive-recompute-activation --num-experts=4",
}


def key_of(words: str) -> str:
    """The row of the table that ``words`` are about."""
    name, _, value = words.partition("=")
    return next((key for key in (f"{name} {value}", name) if key in flags.BY_KEY), name)


def cases() -> dict[str, list[tuple[str, dict]]]:
    runs = {**EFFECTS, **MODEL_EFFECTS, **deepseek4_runs.EFFECTS}
    for more_runs in (MORE_RUNS, deepseek4_runs.MORE_RUNS):
        runs |= {key: [*runs[key], *more] for key, more in more_runs.items()}
    for way_out, block in REFUSED.items():
        runs |= {key_of(words): [(words, dict(error=way_out))] for words in block.split()}
    for parent, block in SETTINGS.items():
        for words in block.split():
            alone, both = dict(says=f"no effect without {parent}"), f"{words} {RUNS[parent]}"
            runs[key_of(words)] = [(words, alone), (both, dict(follows=parent))]
    runs |= {key_of(words): [(words, dict(says="MindSpeed-LLM's own"))] for words in OWN.split()}
    return runs


CASES = cases()


def test_every_flag_has_a_case():
    assert set(CASES) == set(flags.BY_KEY)


@pytest.mark.parametrize("key", list(flags.BY_KEY))
def test_effect(key):
    for words, expected in CASES[key]:
        check(key, words.split(), dict(expected))


def check(key: str, argv: list[str], expected: dict) -> None:
    args = parse(argv)
    error, says, parent = expected.pop("error", None), expected.pop("says", None), expected.pop("follows", None)
    if error is not None:
        with pytest.raises(flags.FlagError) as raised:
            flags.apply(args, argv)
        lines = [line for line in str(raised.value).splitlines() if error in line]
        assert lines, (error, str(raised.value))
        assert (
            flags.BY_KEY[key].name in lines[0]
            or "--rope-scaling-type" in lines[0]
            or "--context" in lines[0]
            or ("--shared-expert-gate" in lines[0] or "--swap-attention" in lines[0])
        )
        return
    if parent is not None:
        lines = {a.flag: a for a in account(args, argv)}
        assert lines[key].text == f"see {parent}" and not lines[key].is_refused and parent in lines
        assert lines[parent].is_refused or flags.BY_KEY[parent].state != "refused"
        return
    lines = flags.apply(args, argv)
    if says is not None:
        assert any(line.startswith(flags.BY_KEY[key].name) and says in line for line in lines), lines
    if "options" in expected:
        assert flags.backend_options(args) == expected.pop("options")
    values = {name: getattr(args, name) for name in expected}
    assert values == pytest.approx(expected) if _numbers(expected) else values == expected


def _numbers(expected: dict) -> bool:
    return bool(expected) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in expected.values())


SKIPPABLE = [flag.key for flag in flags.TABLE if flag.skip]


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_flags_of_memory_and_speed_can_be_skipped(way, monkeypatch):
    for key in SKIPPABLE:
        words = next((w for w, e in CASES[key] if "error" in e), CASES[key][0][0]).split()
        name = flags.BY_KEY[key].name.lstrip("-")
        if way == "flag":
            words = [*words, "--mindspeed-skip-flags", name]
        else:
            monkeypatch.setenv("MINDSPEED_FX_SKIP_FLAGS", f"--{name},")
        args = parse(words)
        assert any(line.endswith("[skipped]") and key in line for line in flags.apply(args, words)), key
        assert getattr(args, flags.BY_KEY[key].attribute) == flags.BY_KEY[key].default
        assert "offload" not in flags.backend_options(args)


@pytest.mark.parametrize(
    "name, word",
    [("--quant-grads", "changes what is computed"), ("--swap-optimizr", 'did you mean "--swap-optimizer"')],
)
def test_what_cannot_be_skipped_is_refused(name, word):
    words = ["--mindspeed-skip-flags", name.lstrip("-")]
    with pytest.raises(ValueError, match=re.escape(word)):
        flags.apply(parse(words), words)


def test_all_refused_flags_stand_in_one_error():
    words = "--compress-optimizer --tp-2d --tp-x 2 --use-fused-rmsnorm --use-ema".split()
    with pytest.raises(flags.FlagError) as raised:
        flags.apply(parse(words), words)
    first, *lines = str(raised.value).splitlines()
    assert first.startswith("3 flags of this run") and len(lines) == 4  # two of --tp-2d: it has a conflict too
    assert [line.split(":")[0].strip() for line in lines] == ["--tp-2d", "--compress-optimizer", "--use-ema", "--tp-2d"]
    assert "--mindspeed-skip-flags compress-optimizer" in lines[1] and "skip" not in lines[2]


def test_a_run_without_flags_of_mindspeed_stays_as_it_is():
    args = parse([])
    before = dict(vars(args))
    assert flags.apply(args, []) == [] and flags.backend_options(args) == {}
    assert vars(args) == before and set(MEGATRON) <= set(before)


def test_arguments_go_into_a_checkpoint_and_come_back():
    """Megatron saves its arguments, and reads them as plain values alone."""
    import argparse
    import io

    import torch

    from mindspeed_fx.megatron.flags.config import with_config_fields

    for runs in {**MODEL, **EXPERTS, **PARALLEL}.values():
        for words, expected in runs:
            if "error" in expected:
                continue
            args = parse(words.split())
            flags.apply(args, words.split())
            with with_config_fields(args):
                pass
            torch.save({"args": args}, checkpoint := io.BytesIO())
            checkpoint.seek(0)
            with torch.serialization.safe_globals([argparse.Namespace]):
                assert vars(torch.load(checkpoint)["args"]) == vars(args), words


def test_deterministic_runs_set_torch_and_the_environment(monkeypatch):
    import os

    import torch

    from mindspeed_fx.megatron.flags.account import start

    names = (
        "HCCL_DETERMINISTIC LCCL_DETERMINISTIC CLOSE_MATMUL_K_SHIFT ATB_MATMUL_SHUFFLE_K_ENABLE PYTHONHASHSEED".split()
    )
    for name in names:
        monkeypatch.setenv(name, "")
    try:
        start(parse(["--npu-deterministic", "--seed", "7"]))
        assert torch.are_deterministic_algorithms_enabled()
        assert [os.environ[name] for name in names] == ["True", "1", "1", "0", "7"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_parser_takes_later_definitions_and_defaults():
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--position-embedding-type", choices=["rope"], default="rope")
    flags.add_arguments(parser)
    parser.add_argument_group("a script's own").add_argument("--noop-layers", default="mine")
    args = parser.parse_args(["--position-embedding-type", "alibi"])
    assert args.position_embedding_type == "alibi" and args.noop_layers == "mine"
    assert args.kv_lora_rank is None
