"""As effects.py, of flags that divide or describe whole models."""

from tests.megatron.flags.effects import MLA, PRE, SPEC

UNEVEN = "--unaligned-linear --tensor-model-parallel-size 3"
UNALIGNED = {
    "--unaligned-linear": [
        ("--unaligned-linear --tensor-model-parallel-size 2", dict(says="divide by 2 tensor-parallel ranks")),
        (UNEVEN, dict(says="4 query groups, 4 heads, a width of 256 in the MLP: the first of 3")),
        (f"{UNEVEN} --sequence-parallel", dict(says="32 tokens")),
        (f"{UNEVEN} --num-experts 4", dict(error="experts beside it")),
        (f"{UNEVEN} {MLA}", dict(error="latent attention beside it")),
        (f"{UNEVEN} --mtp-num-layers 1", dict(error="multi-token prediction beside it")),
        (f"{UNEVEN} --context-parallel-size 2", dict(error="give --context-parallel-size 1")),
        (f"{UNEVEN} --use-ascend-mc2", dict(error="MindSpeed takes one of the two")),
        (f"{UNEVEN} --save some", dict(error="give --ckpt-format torch")),
        (f"{UNEVEN} --save some --ckpt-format torch", dict(says="hold one unit more each")),
        (f"{UNEVEN} --group-query-attention --num-query-groups 2", dict(error="some would have none of 2")),
    ],
}


PHI = f"--spec {SPEC}.phi35_moe_spec layer_spec"
MIXER = f"{PRE} sparsemixer_topk"
PHI_AND_PLM = {
    "--spec mindspeed_llm": [
        (f"{PHI} --num-experts 4", dict(spec=None, mindspeed_layers="dense_bias", moe_layer_freq=1)),
        (f"--spec {SPEC}.plm_spec layer_spec {MLA}", dict(spec=None, qk_layernorm=True)),
        (f"--spec {SPEC}.plm_spec layer_spec", dict(error="plm_spec is latent attention")),
        (f"--spec {SPEC}.plm_spec layer_spec {MLA} --q-lora-rank 8", dict(error="remove --q-lora-rank")),
        (f"--spec {SPEC}.plm_spec layer_spec {MLA} --num-experts 8", dict(error="remove --num-experts")),
    ],
    "--add-dense-bias": [
        (f"{PHI} --add-dense-bias", dict(says="in the output projection")),
        (f"{PHI} --add-dense-bias --mtp-num-layers 1", dict(error="multi-token")),
        ("--add-dense-bias", dict(says="no effect without --spec")),
    ],
    "--add-output-layer-bias": [("--add-output-layer-bias", dict(says="logits have a bias"))],
    f"{PRE} sparsemixer_topk": [
        (f"{MIXER} --moe-router-topk 2", dict(sparse_mixer=True, moe_router_load_balancing_type="none")),
        (f"{MIXER} --moe-router-topk 4", dict(error="give --moe-router-topk 2")),
        (f"{MIXER} --moe-expert-capacity-factor 1.5", dict(error="drops no token")),
    ],
}
MODEL_EFFECTS = {**UNALIGNED, **{key: runs for key, runs in PHI_AND_PLM.items() if key != "--spec mindspeed_llm"}}
"""Flag -> its runs."""
MORE_RUNS = {"--spec mindspeed_llm": PHI_AND_PLM["--spec mindspeed_llm"]}
"""The same of flags that have runs in effects.py."""
