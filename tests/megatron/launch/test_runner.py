"""What the runner of launch scripts says of ranks that failed."""

from __future__ import annotations

import json
import signal

from tests.megatron.launch import runner


def test_a_rank_that_ended_by_a_signal_is_named_before_those_that_lost_it(tmp_path):
    for rank, text in enumerate(("lost its peer", "last words", "waited")):
        (tmp_path / f"{rank}.txt").write_text(text)
    record = {"losses": {}, "grad_norms": {}, "graphs": 1, "chunks": 1, "breaks": [], "code": 1}
    (tmp_path / "0.json").write_text(json.dumps(record))
    run = runner._read(tmp_path, [1, -signal.SIGSEGV, -signal.SIGKILL], late=True)
    assert run.error == "rank 1 ended by SIGSEGV without a record\nlast words"
    assert runner._read(tmp_path, [1, 0], late=False).error == "rank 1 ended without a record\nlast words"
