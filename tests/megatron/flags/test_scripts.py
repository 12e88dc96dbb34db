"""The flags of 61 scripts: each word is accounted for, with Megatron-LM's parser where it is installed and without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_fx import cli
from mindspeed_fx.megatron import flags
from mindspeed_fx.megatron.flags import page
from mindspeed_fx.megatron.flags import parser as flag_parser
from tests.megatron.flags import scripts

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def without_megatron(monkeypatch):
    monkeypatch.setattr(flag_parser, "load_arguments", lambda: None)


def test_the_pages_are_those_of_the_code():
    assert (DOCS / "mindspeed_flags.md").read_text() == page.page()
    assert (DOCS / "mindspeed_scripts.md").read_text() == scripts.page()


def test_every_flag_names_a_test_that_exists():
    folder = Path(__file__).parent
    for flag in flags.TABLE:
        path, _, name = flag.test.partition("::")
        text = (folder / Path(path).name).read_text()
        assert f"\ndef {name.partition('[')[0]}(" in text, flag.test


@pytest.mark.parametrize("name", list(scripts.SCRIPTS))
def test_every_word_is_accounted_for(name, without_megatron):
    words = scripts.words(name)
    accounts = flags.explain(words)
    told = {a.flag.partition(" ")[0] for a in accounts}
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= told
    assert {a.flag for a in accounts if a.is_refused} == set(scripts.refused(name))


def test_the_command_says_it_before_a_run(without_megatron, capsys, tmp_path):
    assert cli.main(["flags", "--", "--num-layers", "4", "--use-fused-rmsnorm"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"compiler +--use-fused-rmsnorm: fusion.rms_norm", out) and "--num-layers: Megatron's" in out
    (tmp_path / "args.json").write_text('["--compress-optimizer", "--noop-layers", "1", "--num-layers", "4"]')
    assert cli.main(["flags", "--file", str(tmp_path / "args.json")]) == 1
    out = capsys.readouterr().out
    assert re.search(r"refused +--compress-optimizer: .*--mindspeed-skip-flags compress-optimizer", out)
    assert "num_layers = 3" in out
    assert cli.main(["flags", "--file", str(tmp_path / "args.json"), "--", "--coc-parallel-num", "many"]) == 2
    assert "invalid int value" in capsys.readouterr().err
    (tmp_path / "args.json").write_text('{"a": 1}')
    assert cli.main(["flags", "--file", str(tmp_path / "args.json")]) == 2
    assert cli.main(["flags"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(flags.TABLE) - 2


@pytest.mark.slow
def test_with_megatrons_parser(tmp_path):
    """In a process of its own, so that megatron.training is not left behind."""
    worker = Path(__file__).parent / "parser_worker.py"
    subprocess.run([sys.executable, str(worker), str(tmp_path)], check=True, timeout=280)
