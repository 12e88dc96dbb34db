"""The picture of a plan holds all of its words."""

import re

from mindspeed_fx.sharding.expected import Send
from mindspeed_fx.sharding.plan_svg import picture


def test_a_long_list_of_messages_is_within_the_picture():
    sends = [Send(kind, "tp", 1 << 20, True, "head", "") for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    drawn = picture({"head.weight": {"tp": "S(0)"}}, {}, sends)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', drawn)[1])
    ends = [float(x) + 5.5 * len(words) for x, words in re.findall(r'<text x="([\d.]+)"[^>]*>([^<]*)<', drawn)]
    assert max(ends) > 1000 and max(ends) <= width
    assert 'viewBox="0 0 1040' in picture({"head.weight": {"tp": "S(0)"}}, {}, sends[:1])
