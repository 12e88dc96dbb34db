"""MindSpeed's tools in Megatron-LM's own loop."""

from __future__ import annotations

import json

from tests.megatron.launch.test_pretrain import train


def test_chosen_iterations_of_chosen_ranks_are_profiled(tmp_path):
    flags = f"--profile --profile-step-start 2 --profile-step-end 3 --profile-ranks 1 --profile-save-path {tmp_path}"
    run = train(f"{flags} --profile-record-shapes --global-batch-size 4", 2)
    assert f"torch.profiler: iterations 2 to 2, a trace for each rank in {tmp_path}" in run.output[0]
    assert set(run.losses) == {1, 2, 3}
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("rank1.")
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    layers = 2  # of one micro-batch; two norms a layer and the last
    assert names.count("mindspeed::swiglu") == layers and names.count("mindspeed::swiglu_backward") == layers
    assert sum(n in ("mindspeed::rms_norm", "mindspeed::add_rms_norm") for n in names) == 2 * layers + 1
