"""MindSpeed's flags in Megatron-LM's own parser, in a process of its own: python parser_worker.py FOLDER."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

from mindspeed_fx.megatron import flags
from tests.megatron.flags import scripts
from tests.megatron.flags.words import MEGATRON
from tests.megatron.launch import runner


def check_scripts() -> None:
    """Megatron's parser finds no unknown word in any script, and refuses what ours refuses alone."""
    for name in scripts.SCRIPTS:
        accounts = flags.explain(scripts.words(name))
        assert not [a for a in accounts if a.state == "unknown"], name
        assert {a.flag for a in accounts if a.is_refused} == set(scripts.refused(name)), name


def check_defaults(arguments) -> None:
    """The defaults that tests take for Megatron's are Megatron's."""
    import argparse

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    own = {action.dest: action.default for action in parser._actions}
    small = {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length"}
    small |= {"max_position_embeddings"}
    assert {k: own[k] for k in MEGATRON if k not in small} == {k: v for k, v in MEGATRON.items() if k not in small}
    shared = {flag.name for flag in flags.SUBJECTS["In Megatron too"]}
    assert shared <= set(parser._option_string_actions)


def parse(arguments, *words: str):
    """What Megatron's parse_args returns and prints, as a script calls it."""
    sys.argv = ["pretrain_gpt.py", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return arguments.parse_args(), out.getvalue()


def check_patched_parser(arguments, folder: Path) -> None:
    from megatron.training import initialize

    original = arguments.parse_args
    flags.patch_parser()
    assert initialize.parse_args is arguments.parse_args is not original
    args, out = parse(arguments, "--num-layers", "4", "--noop-layers", "3", "--use-fused-rmsnorm")
    assert args.num_layers == 3 and "mindspeed_fx: --noop-layers: num_layers = 3 [megatron]" in out
    assert "fusion.rms_norm" in out and flags.backend_options(args) == {}
    again, out = parse(arguments, "--num-layers", "4", "--noop-layers", "3", "--use-fused-rmsnorm")
    assert out == "" and again.num_layers == 3  # a script parses its arguments several times
    try:
        parse(arguments, "--num-layers", "4", "--compress-optimizer", "--use-ema")
        raise AssertionError("not refused")
    except flags.FlagError as error:
        assert str(error).startswith("2 flags of this run are not done")
    args, out = parse(arguments, "--compress-optimizer", "--mindspeed-skip-flags", "compress-optimizer")
    assert "[skipped]" in out and args.compress_optimizer is False
    check_yaml(arguments, folder)
    check_configurations(arguments)
    flags.unpatch_parser()
    assert arguments.parse_args is original is initialize.parse_args


def check_configurations(arguments) -> None:
    """What is set for a script is accepted by Megatron's validate_args and by Megatron-core's configuration."""
    import torch

    from mindspeed_fx.megatron.training import habits

    arguments.get_device_arch_version = lambda: 10
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    layers = {}
    for name, script in scripts.SCRIPTS.items():
        skip = [flag.lstrip("-") for flag, can in scripts.refused(name).items() if can]
        if len(skip) < len(scripts.refused(name)) or name in NOT_MEGATRONS:
            continue
        os.environ.update(WORLD_SIZE=str(script["world"]), RANK="0")
        args, _ = parse(arguments, *scripts.words(name), *(["--mindspeed-skip-flags", *skip] if skip else []))
        habits.settle(args)
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if args.use_torch_fsdp2 else "1"
        with contextlib.redirect_stdout(io.StringIO()):
            habits.check_hidden(arguments.validate_args, args, {"tokenizer_type": "GPT2BPETokenizer"})
        layers[name] = arguments.core_transformer_config_from_args(args).num_layers
    args, _ = parse(arguments, *GELU)
    habits.settle(args)
    config = arguments.core_transformer_config_from_args(arguments.validate_args(args) or args)
    assert config.gated_linear_unit and config.activation_func.keywords == {"approximate": "tanh"}
    assert config.output_layer_init_method.keywords["std"] == 0.02 / (2 * 4) ** 0.5 and config.num_layers == 3
    assert not hasattr(args, "activation_func")
    assert len(layers) == len(scripts.SCRIPTS) - len(NOT_MEGATRONS) - 1, layers  # one has a refused tokenizer
    assert layers["glm45-air__pretrain_glm45_air_106b_4k_A3_ptd"] == 46


GELU = (
    "--num-layers 4 --noop-layers 3 --gelu-tanh --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 "
    "--micro-batch-size 1 --seq-length 16 --max-position-embeddings 16 --transformer-impl local --lr 1e-3 "
    "--no-masked-softmax-fusion --no-gradient-accumulation-fusion"
).split()

UNEVEN = "the adaptor's patches of a run make heads divisible: tests/megatron/test_uneven.py"
NOT_MEGATRONS = {
    "system_tests__feature_tests__custom_fsdp": "Megatron's FSDP asks for another form of checkpoints",
    "system_tests__feature_tests__unaligned_pp": UNEVEN,
    "system_tests__feature_tests__unaligned_tpsp": UNEVEN,
    "system_tests__yaml_args_example__pretrain_yaml_args": "its file is of an older Megatron-LM",
}
"""Scripts that Megatron 0.16 itself refuses."""


def check_yaml(arguments, folder: Path) -> None:
    """Beside a file of arguments, flags of options count; what would set Megatron's arguments is named for the file."""
    (folder / "model.yaml").write_text(
        "enable_msc: true\nlanguage_model:\n  num_layers: 4\nmodel_parallel:\n  context_parallel_size: 1\n"
    )
    args, _ = parse(arguments, "--yaml-cfg", str(folder / "model.yaml"), "--recompute-norm")
    assert flags.backend_options(args) == {"recompute": "norm"} and args.language_model.num_layers == 4
    for words, line in (
        (["--shared-expert-gate"], "write moe_shared_expert_gate into the file"),
        (["--noop-layers", "3"], "--num-layers"),
    ):
        try:
            parse(arguments, "--yaml-cfg", str(folder / "model.yaml"), *words)
            raise AssertionError("not refused")
        except flags.FlagError as error:
            assert line in str(error), error


if __name__ == "__main__":
    sys.path.insert(0, str(runner.checkout()))
    arguments = flags.load_arguments()
    assert arguments is not None
    check_defaults(arguments)
    check_scripts()
    check_patched_parser(arguments, Path(sys.argv[1]))
    print("fine")
