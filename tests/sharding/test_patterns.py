"""Globs of a plan that are looked up together match what they match one by one."""

from __future__ import annotations

import fnmatch

from mindspeed_fx.sharding.patterns import matching, matching_alternatives, matching_operators, of_operator

PATTERNS = [
    "layers.0.up",
    "*",
    "layers.*.up|head",
    "layers.?.up",
    "layers.[01].*",
    "head",
    "[!l]*",
    "layers.0.up",
    "a[1]",
]
NAMES = ["layers.0.up", "layers.1.up", "layers.10.up", "head", "a[1]", "a1", "", "layers.*.up|head"]


def test_as_one_by_one():
    for name in NAMES:
        assert matching(PATTERNS, name) == [p for p in PATTERNS if fnmatch.fnmatchcase(name, p)]
        assert matching_alternatives(PATTERNS, name) == [
            p for p in PATTERNS if any(fnmatch.fnmatchcase(name, one) for one in p.split("|"))
        ]


def test_operators_of_a_module():
    """A module in front means its calls alone, and is heard last; without one every module's are meant."""
    assert of_operator("layers.*.attn/aten.mm|aten.bmm") == ("layers.*.attn", "aten.mm|aten.bmm")
    assert of_operator("aten.mm") == ("", "aten.mm")
    plan = ("layers.1.attn/aten.mm|aten.bmm", "aten.*", "layers.*/aten.mm", "mindspeed.rope")
    assert matching_operators(plan, "aten.mm", "layers.1.attn") == ["aten.*", plan[0], plan[2]]
    assert matching_operators(plan, "aten.bmm", "layers.0.attn") == ["aten.*"]
    assert matching_operators(plan, "mindspeed.rope", "") == ["mindspeed.rope"]
