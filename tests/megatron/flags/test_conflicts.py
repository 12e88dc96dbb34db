"""Every pair of which MindSpeed takes one: refused by both names, or done here for a reason."""

from pathlib import Path

import pytest

from mindspeed_fx import cli
from mindspeed_fx.megatron import flags
from mindspeed_fx.megatron.flags import conflicts
from mindspeed_fx.megatron.flags.account import account
from tests.megatron.flags.words import parse

VALUES = {
    "--ampipe-degree": "2",
    "--adaptive-recompute-device-size": "1024",
    "--moe-zero-memory": "level0",
    "--moe-zero-memory-num-layers": "1",
    "--expert-model-parallel-size": "2",
    "--num-experts": "4",
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--context-parallel-size": "2",
    "--load": "somewhere",
    "--save": "somewhere",
    "--recompute-granularity": "full",
    "--moe-expert-capacity-factor": "1.5",
    "--pipeline-model-parallel-layout": "Et*2|t*2L",
    "--num-layer-list": "1,3",
    "--pipeline-num-transformer-layers": "[[1],[3]]",
    "--noop-layers": "1",
    "--schedules-method": "dualpipev",
    "--virtual-optimizer": "0.5",
    "--compress-dense": "level0",
}
"""Of flags that take one."""


def words_of(name: str) -> list[str]:
    flag, _, value = name.partition(" ")
    value = value or VALUES.get(flag, "")
    return [flag, *([value] if value else [])]


def name(conflict):
    return f"{conflict.first} {conflict.second}".replace(" ", "")


@pytest.mark.parametrize("conflict", conflicts.CONFLICTS, ids=name)
def test_a_pair(conflict):
    both = ["--num-layers", "4", *words_of(conflict.first), *words_of(conflict.second)]
    assert conflict.is_asked(parse(both))
    if conflict.done:
        assert conflict.text not in [a.text for a in account(parse(both), both)]
        return
    with pytest.raises(flags.FlagError) as error:
        flags.apply(parse(both), both)
    lines = [line for line in str(error.value).splitlines() if conflict.first in line and conflict.second in line]
    assert lines, str(error.value)


@pytest.mark.parametrize("conflict", conflicts.CONFLICTS, ids=name)
def test_one_of_a_pair_asks_for_no_other(conflict):
    for one in (conflict.first, conflict.second):
        assert not conflict.is_asked(parse(["--num-layers", "4", *words_of(one)]))


def test_a_pair_stands_in_the_table_once():
    pairs = [frozenset((c.first, c.second)) for c in conflicts.CONFLICTS]
    assert len(set(pairs)) == len(pairs) > 60


def test_a_flag_that_is_skipped_conflicts_with_nothing():
    both = ["--smart-swap", "--adaptive-recompute-device-size", "1024", "--mindspeed-skip-flags", "smart-swap"]
    accounts = account(parse(both), both)
    assert not [a for a in accounts if "MindSpeed does not take" in a.text]


def test_the_page_is_that_of_the_code(capsys):
    page = Path(__file__).parents[3] / "docs" / "mindspeed_conflicts.md"
    assert page.read_text() == conflicts.page()
    assert cli.main(["flags", "--conflicts"]) == 0 and capsys.readouterr().out == conflicts.page()
    assert cli.main(["flags", "--conflicts", "--", "--num-layers", "4"]) == 2
