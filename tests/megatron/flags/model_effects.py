"""As effects.py, of flags that divide or describe whole models."""

from mindspeed_fx.megatron import uneven
from tests.megatron.flags.effects import MLA, PRE, SPEC

UNEVEN = "--unaligned-linear --tensor-model-parallel-size 3"
UNALIGNED = {
    "--unaligned-linear": [
        ("--unaligned-linear --tensor-model-parallel-size 2", dict(says="divide by 2 tensor-parallel ranks")),
        (
            UNEVEN,
            dict(options=uneven.OPTIONS, says="4 query groups, 4 heads, a width of 256 in the MLP: the first of 3"),
        ),
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
SPECS = {
    "--spec mindspeed_llm": [
        (f"{PHI} --num-experts 4", dict(spec=None, mindspeed_layers="dense_bias", moe_layer_freq=1)),
        (f"--spec {SPEC}.plm_spec layer_spec {MLA}", dict(spec=None, qk_layernorm=True)),
        (f"--spec {SPEC}.plm_spec layer_spec", dict(error="plm_spec is latent attention")),
        (f"--spec {SPEC}.plm_spec layer_spec {MLA} --q-lora-rank 8", dict(error="remove --q-lora-rank")),
        (f"--spec {SPEC}.plm_spec layer_spec {MLA} --num-experts 8", dict(error="remove --num-experts")),
    ],
}
PHI_AND_PLM = {
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
SPARSE_MODEL = f"{MLA} --q-lora-rank 32 --num-experts 4"
DSA = f"--enable-dsa-indexer {SPARSE_MODEL}"
NORMS = "--init-norm-weight-in-fp32"
SPARSE = {
    "--enable-dsa-indexer": [
        (DSA, dict(dsa_indexer_loss_coeff=1.0, says="sees 2048 tokens")),
        (f"{DSA} --index-topk 8 --indexer-loss-coeff 0.5", dict(dsa_indexer_loss_coeff=0.5)),
        ("--enable-dsa-indexer --num-experts 4", dict(error="give --multi-latent-attention and --q-lora-rank")),
        (f"--enable-dsa-indexer {MLA} --q-lora-rank 32", dict(error="give --num-experts")),
        (f"{DSA} --indexer-qk-quant-scheme mxfp8", dict(error="remove --indexer-qk-quant-scheme")),
        (f"{DSA} --experimental-attention-variant dsa", dict(error="asks for other layers")),
        (f"{DSA} --context-parallel-size 2", dict(error="give --context-parallel-size 1")),
        (f"{DSA} --reset-attention-mask", dict(error="remove --reset-attention-mask")),
        (f"{DSA} --attention-dropout 0.1", dict(error="give --attention-dropout 0")),
        (f"{DSA} --recompute-granularity selective", dict(error="give --recompute-granularity full")),
        (
            f"{DSA} --rope-scaling-type yarn --rope-scaling-original-max-position-embeddings 64",
            dict(error="leaves out YaRN's factor"),
        ),
        (f"{DSA} --index-topk-freq 2 --mtp-num-layers 1", dict(error="choose for themselves")),
        (f"{DSA} --index-topk-pattern CSCS --noop-layers 1", dict(error="remove --noop-layers")),
    ],
    NORMS: [
        (f"{NORMS} --bf16", dict(says="weights of norms are float32")),
        (NORMS, dict(says="no effect without --bf16")),
        (f"{NORMS} --bf16 --reuse-fp32-param", dict(error="remove one of the two")),
        (f"{NORMS} --bf16 --use-megatron-fsdp", dict(error="remove --use-megatron-fsdp")),
    ],
}
LONGCAT = f"--spec {SPEC}.longcat_spec layer_spec"
SOFTMAX = f"{PRE} softmax_topk --num-experts 8"
SCALES = "--enable-mla-scale-q-lora --enable-mla-scale-kv-lora"
SHORTCUTS = {
    "--num-zero-experts": [
        (f"--num-zero-experts 4 {SOFTMAX}", dict(biased_softmax=True, says="4 rows more")),
        ("--num-zero-experts 4 --num-experts 8", dict(error="softmax_topk; give it")),
        ("--num-zero-experts 4", dict(says="no effect without experts")),
        (f"--num-zero-experts 4 {SOFTMAX} --moe-latent-size 16", dict(error="remove --moe-latent-size")),
    ],
    "--enable-mla-scale-q-lora": [
        (f"{SCALES} {MLA} --q-lora-rank 32", dict(says="over q_lora_rank")),
        (f"{SCALES} {MLA}", dict(error="give --q-lora-rank")),
        (SCALES, dict(says="no effect without --multi-latent-attention")),
    ],
    "--enable-mla-scale-kv-lora": [
        (f"{SCALES} {MLA} --q-lora-rank 32", dict(says="over kv_lora_rank")),
        (f"--enable-mla-scale-kv-lora {DSA}", dict(error="remove --enable-dsa-indexer")),
    ],
}
SPECS_OF_LONGCAT = [
    (f"{LONGCAT} {SPARSE_MODEL}", dict(spec=None, mindspeed_layers="shortcut", moe_layer_freq=1)),
    (f"{LONGCAT} {MLA}", dict(error="give --num-experts")),
    (f"{LONGCAT} --num-experts 4", dict(error="longcat_spec is latent attention")),
    (f"{LONGCAT} {SPARSE_MODEL} --mtp-num-layers 1", dict(error="remove --mtp-num-layers")),
    (
        f"{LONGCAT} {SPARSE_MODEL} --recompute-granularity selective --recompute-modules moe",
        dict(error="give --recompute-modules core_attn"),
    ),
]
BIASED = [
    (f"{SOFTMAX} --moe-router-enable-expert-bias", dict(softmax_has_expert_bias=True)),
    (f"{SOFTMAX} --moe-router-enable-expert-bias", dict(moe_router_enable_expert_bias=False)),
    (f"{SOFTMAX} --moe-router-enable-expert-bias --norm-topk-prob", dict(error="remove --norm-topk-prob")),
]
MODEL_EFFECTS = {**UNALIGNED, **SPARSE, **PHI_AND_PLM, **SHORTCUTS}
"""Flag -> its runs."""
MORE_RUNS = {
    "--spec mindspeed_llm": [*SPECS["--spec mindspeed_llm"], *SPECS_OF_LONGCAT],
    f"{PRE} softmax_topk": BIASED,
}
"""The same of flags that have runs in effects.py."""
