"""Mistakes of a new user of pretrain_gpt.py end in one clear error."""

from __future__ import annotations

import runpy
from argparse import Namespace

import pytest

from mindspeed_fx.megatron.training import assertions, initialize
from tests.megatron.launch import runner
from tests.megatron.launch.test_pretrain import EAGER


CHECK = """
def check(args, defaults=None):
    assert args.seq_length, "seq_length is None"
    assert args.micro_batch_size is not None
    assert args.global_batch_size \\
        % args.micro_batch_size == 0
    assert defaults
    return "checked"
"""
"""In a file of its own: pytest gives assertions of tests words."""


def test_an_assertion_without_words_names_the_flags_that_it_reads(tmp_path):
    (tmp_path / "check.py").write_text(CHECK)
    check = runpy.run_path(str(tmp_path / "check.py"))["check"]
    args = Namespace(seq_length=4, micro_batch_size=None, global_batch_size=6)
    with pytest.raises(ValueError, match=r"^--micro-batch-size \(now None\): Megatron-LM asks for `args.micro_batch"):
        assertions.with_words(check, args)
    args.micro_batch_size = 4
    with pytest.raises(ValueError, match=r"^--global-batch-size \(now 6\), --micro-batch-size \(now 4\): .* == 0"):
        assertions.with_words(check, args)
    args.micro_batch_size = 3
    with pytest.raises(ValueError, match="^arguments: Megatron-LM asks for `defaults`"):
        assertions.with_words(check, args)
    assert assertions.with_words(check, args, {"a": 1}) == "checked"
    args.seq_length = 0
    with pytest.raises(AssertionError, match="seq_length is None"):
        assertions.with_words(check, args)


def test_a_process_without_a_launcher_is_a_run_of_one_rank(monkeypatch):
    seen = []
    monkeypatch.setattr(initialize, "_initialize_distributed", lambda: seen.append(dict(initialize.os.environ)))
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    initialize.initialize_distributed()
    assert seen[0]["MASTER_ADDR"] == "127.0.0.1" and int(seen[0]["MASTER_PORT"]) > 0
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    initialize.initialize_distributed()
    assert "MASTER_ADDR" not in seen[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, words",
    [
        ("", "--micro-batch-size (now None): Megatron-LM asks for"),
        ("--micro-batch-size 1", "either num-layers or encoder-num-layers should be specified"),
        ("--overlap-grad-reduc2", "unrecognized arguments: --overlap-grad-reduc2"),
    ],
)
def test_the_script_says_what_it_misses(flags, words):
    result = runner.run(flags.split(), 1, environ=EAGER)
    assert result.error is not None and words in result.output[0]
