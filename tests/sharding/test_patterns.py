"""Globs of a plan that are looked up together match what they match one by one."""

from __future__ import annotations

import fnmatch

from mindspeed_fx.sharding.patterns import matching, matching_alternatives

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
