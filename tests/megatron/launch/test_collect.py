"""Arguments of launch scripts as bash expands them, and nothing else of a script done."""

from __future__ import annotations

import json

from tests.megatron.launch import collect, shrink

SCRIPT = """
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
source /usr/local/Ascend/set_env.sh
TP=2
LAYERS=$(($TP * 4))
ARGS="
    --tensor-model-parallel-size ${TP} \\
    --num-layers $LAYERS
"
DISTRIBUTED="--nproc_per_node 8 --nnodes 2"
rm -rf $KEEP; pkill -9 python; touch $KEEP/more
torchrun $DISTRIBUTED pretrain_gpt.py $ARGS --bf16 | tee logs/run.log
python convert_ckpt.py --model-type GPT
"""


def test_resolve(tmp_path, monkeypatch):
    keep = tmp_path / "keep"
    keep.mkdir()
    script = tmp_path / "llama" / "pretrain_llama.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT.replace("$KEEP", str(keep)))
    runs = collect.resolve(script)
    args = "--tensor-model-parallel-size 2 --num-layers 8 --bf16".split()
    assert runs == {"llama__pretrain_llama": {"entry": "pretrain_gpt.py", "world": 16, "args": args}}
    assert keep.is_dir() and not any(keep.iterdir())


def test_new_scripts(tmp_path):
    """One that a committed collection has is not new, nor the same once more under another name."""
    known = json.loads((shrink.HERE / "mindspeed.json").read_text())
    name = next(n for n, s in known.items() if s["entry"] == "pretrain_gpt.py")
    longer = {**known[name], "args": [*known[name]["args"], "--no-rope-fusion"]}
    (tmp_path / "mine.json").write_text(json.dumps({"known": known[name], "a": longer, "b": longer}))
    assert [s.name for s in collect.new_scripts(tmp_path / "mine.json")] == ["a"]
