"""As effects.py, of flags that divide or describe whole models."""

from mindspeed_fx.megatron import uneven
from tests.megatron.flags.layer_effects import MLA, PRE, SPEC

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
    **{
        name: [
            (f"{DSA} {name}", dict(says="reads the chosen keys alone")),
            (f"{name} {SPARSE_MODEL}", dict(says="no effect without --enable-dsa-indexer")),
        ]
        for name in (
            "--use-fused-lightning-indexer",
            "--use-fused-lightning-indexer-kl-loss",
            "--use-fused-lightning-indexer-loss",
            "--use-fused-sparse-flash-attention",
            "--use-sparse-flash-attn",
        )
    },
    **{
        name: [
            (f"{DSA} {name}", dict(says="one key and one value, the latent")),
            (f"{name} {SPARSE_MODEL}", alone),
            (name, dict(error=bare)),
            (f"{DSA} {name} --recompute-mla-up-proj", dict(says="one key and one value, the latent")),
            (
                f"{DSA} {name} --recompute-granularity selective --recompute-modules mla_up_proj",
                dict(error="remove --recompute-modules mla_up_proj"),
            ),
        ]
        for name, alone, bare in (
            (
                "--enable-mla-absorb",
                dict(absorb_up_projections=True, says="more work in this form"),
                "give --multi-latent-attention",
            ),
            ("--use-dsa-absorb", dict(error="--enable-mla-absorb absorbs without one"), "absorbs without one"),
        )
    },
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
DEEPSPEED = "--moe-model-type deepspeed_moe --num-experts 4"
NO_DEEPSPEED = dict(says="no effect without --moe-model-type deepspeed_moe")
EVERY_SECOND = dict(moe_layer_freq=[0, 1, 0, 1])
DROPS = dict(moe_expert_capacity_factor=1.5, moe_pad_expert_input_to_capacity=True, use_legacy_models=False)
DEEPSPEED_MOE = {
    "--moe-model-type": [
        (f"{DEEPSPEED} --use-legacy-models --moe-train-capacity-factor 1.5", DROPS),
        (f"{DEEPSPEED} --moe-no-drop", dict(moe_expert_capacity_factor=None, moe_token_dispatcher_type="alltoall")),
        (f"{DEEPSPEED} --moe-router-topk 1 --moe-aux-loss-coeff 0.1", dict(moe_aux_loss_coeff=0.0)),
        ("--moe-model-type deepspeed_moe", dict(says="no effect without --num-experts")),
        ("--moe-model-type megatron_moe", dict(says="Megatron's experts")),
        (f"{DEEPSPEED} --moe-router-topk 3", dict(error="--moe-router-topk is 3")),
        (f"{DEEPSPEED} --moe-train-capacity-factor 0.0", dict(error="--moe-train-capacity-factor is 0.0")),
        (f"{DEEPSPEED} --moe-expert-capacity-factor 1.5", dict(error="remove --moe-expert-capacity-factor")),
        (f"{DEEPSPEED} --n-shared-experts 1", dict(error="remove --moe-shared-expert-intermediate-size")),
        (f"{DEEPSPEED} --moe-ffn-hidden-size 96", dict(error="remove --moe-ffn-hidden-size")),
        (f"{DEEPSPEED} {PRE} sinkhorn", dict(error="remove --moe-router-load-balancing-type")),
        (f"{DEEPSPEED} --moe-router-score-function sigmoid", dict(error="remove --moe-router-score-function")),
        (f"{DEEPSPEED} --tensor-model-parallel-size 2", dict(error="needs --sequence-parallel")),
        (f"{DEEPSPEED} --moe-dynamic-padding", dict(error="--moe-dynamic-padding is about --moe-no-drop")),
        (f"{DEEPSPEED} --moe-no-drop --pipeline-model-parallel-size 2", dict(error="--moe-no-drop beside --pipeline")),
        (f"{DEEPSPEED} --moe-permutation-async-comm", dict(error="beside --moe-permutation-async-comm")),
        (f"{DEEPSPEED} --use-ascend-coc", dict(error="beside --use-ascend-coc")),
    ],
    "--enable-token-rearrange-opt": [
        (f"--enable-token-rearrange-opt {DEEPSPEED}", dict(says="indexed in any case")),
        ("--enable-token-rearrange-opt", NO_DEEPSPEED),
    ],
    "--moe-dynamic-padding": [
        (f"--moe-dynamic-padding --moe-no-drop {DEEPSPEED}", dict(says="no padding")),
        ("--moe-dynamic-padding", NO_DEEPSPEED),
    ],
    "--noisy-gate-policy": [
        (f"--noisy-gate-policy RSample {DEEPSPEED} --moe-router-topk 1", dict(says="Gumbel noise")),
        (f"--noisy-gate-policy RSample {DEEPSPEED}", dict(says="read with one expert")),
        (f"--noisy-gate-policy Jitter {DEEPSPEED}", dict(says="tokens times 1 +- 0.01")),
        (f"--noisy-gate-policy None {DEEPSPEED}", dict(says="no noise")),
        ("--noisy-gate-policy Jitter", NO_DEEPSPEED),
    ],
    "--no-use-rts": [(f"--no-use-rts {DEEPSPEED}", dict(use_rts=False))],
    "--expert-interval": [
        (f"--expert-interval 2 {DEEPSPEED}", EVERY_SECOND),
        (f"--expert-interval 1 {DEEPSPEED}", dict(moe_layer_freq=1)),
        (f"--expert-interval 5 {DEEPSPEED}", dict(error="5 is no number from 1 to --num-layers 4")),
        (f"--expert-interval 2 {DEEPSPEED} --moe-layer-freq 2", dict(error="remove one of the two")),
        ("--expert-interval 3", NO_DEEPSPEED),
    ],
    "--use-pipe-experts": [
        (f"--use-pipe-experts {DEEPSPEED}", dict(says="every expert by itself", options={})),
        (f"--use-pipe-experts --pipe-experts-multi-data 4 {DEEPSPEED}", dict(says="4 slices of every expert")),
        (
            f"--use-pipe-experts --pipe-experts-multi-data 3 --ampipe-degree 2 {DEEPSPEED}",
            dict(says="3 slices are no larger multiple"),
        ),
        (f"--use-pipe-experts --moe-zero-memory level0 {DEEPSPEED}", dict(error="remove --moe-zero-memory")),
        (f"--use-pipe-experts {DEEPSPEED} --moe-no-drop", dict(says="one exchange", options={})),
        (f"--use-pipe-experts --pipe-experts-multi-data 0 {DEEPSPEED}", dict(error="--pipe-experts-multi-data is 0")),
        (f"--use-pipe-experts --pipe-experts-multi-stream {DEEPSPEED}", dict(error="--sequence-parallel in MindSpeed")),
        ("--use-pipe-experts", NO_DEEPSPEED),
    ],
    "--ampipe-degree": [
        (f"--ampipe-degree 4 {DEEPSPEED}", dict(says="each of 4 parts")),
        (f"--ampipe-degree 2 {DEEPSPEED} --moe-z-loss-coeff 0.1", dict(error="remove --moe-z-loss-coeff")),
        (f"--ampipe-degree 2 {DEEPSPEED} --moe-no-drop", dict(says="each of 2 parts of a rank's tokens")),
        (f"--ampipe-degree 2 {DEEPSPEED} --context-parallel-size 2", dict(says="attention whole (context")),
        ("--ampipe-degree 1", dict(says="one part")),
        ("--ampipe-degree 2", dict(error="give --moe-model-type deepspeed_moe")),
        (f"--ampipe-degree 0 {DEEPSPEED}", dict(error="0 is no number of parts")),
        (f"--ampipe-degree 3 {DEEPSPEED}", dict(error="--seq-length 32 is not divided by 3 parts")),
        (f"--ampipe-degree 4 {DEEPSPEED} --context-parallel-size 2", dict(error="--ampipe-degree 2")),
    ],
}

MODEL_EFFECTS = {**UNALIGNED, **SPARSE, **PHI_AND_PLM, **SHORTCUTS, **DEEPSPEED_MOE}
"""Flag -> its runs."""
MORE_RUNS = {
    "--spec mindspeed_llm": [*SPECS["--spec mindspeed_llm"], *SPECS_OF_LONGCAT],
    f"{PRE} softmax_topk": BIASED,
}
"""The same of flags that have runs in effects.py."""
