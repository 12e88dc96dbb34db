"""Flag -> runs of it: the words, and what they do to Megatron's arguments and to the backend's options ("options"),
what their line holds ("says"), or what their error holds ("error").
"""

from pathlib import Path

MLA = "--multi-latent-attention --qk-head-dim 128 --qk-pos-emb-head-dim 64 --kv-lora-rank 512 --v-head-dim 128"
YARN = (
    f"{MLA} --rope-scaling-type yarn --rope-scaling-factor 40 --rope-scaling-original-max-position-embeddings 4096 "
    "--rope-scaling-mscale 0.7 --rope-scaling-mscale-all-dim 0.5 --beta-fast 31 --beta-slow 2"
)
YARN_SETS = dict(
    rope_type="yarn",
    rotary_scaling_factor=40,
    original_max_position_embeddings=4096,
    mscale=0.7,
    mscale_all_dim=0.5,
    beta_fast=31,
    beta_slow=2,
)
SPEC = "mindspeed_llm.tasks.models.spec"
LONGROPE = (
    "--rope-scaling-type longrope --rope-scaling-original-max-position-embeddings 64 --position-embedding-type rope "
    "--long-factor 1.5,3.5,4.5,9.5 --short-factor 1,1.25,1.5,2"
)
DELTA = "--full-attention-interval 3 --swiglu"
DELTA_SETS = dict(
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=3,
    linear_conv_kernel_dim=5,
    attention_output_gate=True,
)
LLAMA3 = "--rope-scaling-type llama3 --low-freq-factor 1 --high-freq-factor 4 --original-max-position-embeddings 8192"
PRE = "--moe-router-load-balancing-type"
PLACED = "--enable-expert-placement --num-experts 8 --expert-model-parallel-size 2"
HOT = "--balanced-moe-experts --num-experts 8 --expert-model-parallel-size 2 --disable-bias-linear"
LIMITED = (
    f"{PRE} group_limited_greedy --num-experts 8 --moe-router-topk 3 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"
)
CONTEXT = dict(says="context parallel size 1")
SPEED = dict(says="overlap.schedule")
EXCHANGED = "--moe-token-dispatcher-type alltoall"
NARROW = "--bf16 --expert-model-parallel-size 2"
LOWERED = dict(says="lowered")
BETWEEN = dict(says="between stages")
UNGROUPED = dict(moe_router_num_groups=None, moe_router_group_topk=None)

MODEL = {
    "--qk-rope-head-dim": [("--qk-rope-head-dim 64", dict(qk_pos_emb_head_dim=64))],
    "--qk-nope-head-dim": [("--qk-nope-head-dim 128", dict(qk_head_dim=128))],
    "--multi-head-latent-attention": [("--multi-head-latent-attention", dict(multi_latent_attention=True))],
    "--moe-intermediate-size": [
        ("--moe-intermediate-size 96 --n-shared-experts 2", dict(moe_shared_expert_intermediate_size=192))
    ],
    "--n-group": [("--n-group 8", dict(moe_router_num_groups=8))],
    "--topk-group": [("--topk-group 4", dict(moe_router_group_topk=4))],
    "--routed-scaling-factor": [("--routed-scaling-factor 2.5", dict(moe_router_topk_scaling_factor=2.5))],
    "--rope-scaling-beta-fast": [("--rope-scaling-beta-fast 30", dict(beta_fast=30))],
    "--rope-scaling-beta-slow": [("--rope-scaling-beta-slow 3", dict(beta_slow=3))],
    "--yarn-scaling-factor": [
        (f"{YARN} --yarn-scaling-factor 16", {**YARN_SETS, "rotary_scaling_factor": 16.0}),
    ],
    "--cp-attention-mask-type": [("--cp-attention-mask-type general", dict(attention_mask_type="general"))],
    "--use-mc2": [("--use-mc2", dict(options={"enable": ["overlap.mc2"]}))],
    "--use-deter-comp": [("--use-deter-comp", dict(npu_deterministic=True, says="npu_deterministic"))],
    "--spec mindspeed_llm": [
        (f"--spec {SPEC}.qwen3_spec layer_spec", dict(spec=None)),
        (f"--spec {SPEC}.qwen3_spec layer_spec --num-experts 4 --moe-layer-freq 2", dict(moe_layer_freq=1)),
        (f"--spec {SPEC}.deepseek_spec layer_spec {MLA}", dict(spec=None, rope_type="rope")),
        (f"--spec {SPEC}.deepseek_spec layer_spec", dict(error="give --multi-latent-attention")),
        (f"--spec {SPEC}.gemma2_spec layer_spec --post-norm", dict(spec=None, mindspeed_layers="post_norm")),
        (f"--spec {SPEC}.gemma2_spec layer_spec", dict(error="give --post-norm")),
        (f"--spec {SPEC}.grok_spec layer_spec --post-norm", dict(spec=None, mindspeed_layers="post_norm")),
        (f"--spec {SPEC}.qwen2_moe_spec layer_spec --num-experts 4", dict(spec=None, moe_layer_freq=1)),
        (f"--spec {SPEC}.minicpm_spec layer_spec", dict(error="give --multi-latent-attention")),
        (f"--spec {SPEC}.minimax_spec layer_spec", dict(spec=None, mindspeed_layers="all_heads")),
        (f"--spec {SPEC}.minimax_spec s --tensor-model-parallel-size 2", dict(error="on one rank")),
        (f"--spec {SPEC}.qwen3_next_spec layer_spec {DELTA}", dict(spec=None, linear_attention_freq=3)),
        (f"--spec {SPEC}.qwen3_next_spec layer_spec", dict(error="--full-attention-interval; give it")),
        (f"--spec {SPEC}.none_spec layer_spec", dict(error="none_spec are not Megatron's own")),
        ("--spec mine.layers spec", dict(spec=["mine.layers", "spec"])),
    ],
    "--rope-scaling-type": [
        (YARN, YARN_SETS),
        ("--rope-scaling-type yarn", dict(error="give --rope-scaling-original-max-position-embeddings")),
        (
            "--rope-scaling-type yarn --rope-scaling-original-max-position-embeddings 64",
            dict(error="give --position-embedding-type rope"),
        ),
        (
            "--rope-scaling-type yarn --rope-scaling-original-max-position-embeddings 64 "
            "--position-embedding-type rope",
            dict(scaled_rotation="yarn"),
        ),
        (f"{MLA} --rope-scaling-type yarn", dict(error="give --rope-scaling-original-max-position-embeddings")),
        (LLAMA3, dict(use_rope_scaling=True)),
        (LLAMA3.replace("8192", "4096"), dict(error="is fixed to")),
        ("--rope-scaling-type plm", dict(rope_type=None, says="plain")),
        (f"--rope-scaling-type plm {MLA}", dict(rope_type="rope")),
        ("--rope-scaling-type plm --kv-channels 8", dict(error="remove --kv-channels")),
        ("--rope-scaling-type plm --rotary-percent 0.5", dict(error="remove --rotary-percent")),
        ("--rope-scaling-type longrope", dict(error="give --long-factor")),
        (f"{MLA} {LONGROPE}", dict(error="latent attention takes no such frequencies")),
        (f"{LONGROPE} --long-mscale 1.1", dict(error="give --long-mscale and --short-mscale, or neither")),
        (LONGROPE, dict(scaled_rotation="longrope")),
    ],
    **{
        flag: [(f"{LONGROPE} {words}", dict(scaled_rotation="longrope"))]
        for flag, words in {
            "--longrope-freqs-type": "--longrope-freqs-type outer",
            "--long-factor": "",
            "--short-factor": "",
            "--long-mscale": "--long-mscale 1.1 --short-mscale 1.2",
            "--short-mscale": "--long-mscale 1.1 --short-mscale 1.2",
        }.items()
    },
    "--rope-scaling-mscale": [(YARN, dict(mscale=0.7))],
    "--rope-scaling-mscale-all-dim": [(YARN, dict(mscale_all_dim=0.5))],
    "--rope-scaling-original-max-position-embeddings": [(YARN, dict(original_max_position_embeddings=4096))],
    "--beta-fast": [(YARN, dict(beta_fast=31)), ("--beta-fast 31", dict(says="no effect without latent attention"))],
    "--beta-slow": [(YARN, dict(beta_slow=2)), ("--beta-slow 2", dict(says="no effect without latent attention"))],
    "--low-freq-factor": [(LLAMA3.replace("factor 1", "factor 2"), dict(error="is fixed to"))],
    "--high-freq-factor": [(LLAMA3.replace("factor 4", "factor 5"), dict(error="is fixed to"))],
    "--original-max-position-embeddings": [(LLAMA3.replace("8192", "1024"), dict(error="is fixed to"))],
    "--partial-rotary-factor": [("--partial-rotary-factor 0.25", dict(rotary_percent=0.25))],
    "--dynamic-factor": [
        ("--dynamic-factor 2 --seq-length 64 --kv-channels 16", dict(rotary_base=10000 * 3 ** (16 / 14))),
        ("--dynamic-factor 0.5", dict(rotary_base=10000)),
    ],
    "--query-pre-attn-scalar": [("--query-pre-attn-scalar 144", dict(softmax_scale=1 / 12))],
    "--geglu": [("--geglu --swiglu", dict(mindspeed_gate="none", swiglu=False, bias_gelu_fusion=False))],
    "--gelu-tanh": [("--gelu-tanh", dict(mindspeed_gate="tanh", swiglu=False, bias_gelu_fusion=False))],
}

MTP = "--mtp-num-layers 1"
TOPK_WIDE, REVERT = "--topk-softmax-in-fp32", "--moe-revert-type-after-topk"
EMA = "--optimizer-selection fused_ema_adamw"
ALIBI = "--position-embedding-type alibi"
ALIBI_FORMS = ("--alibi-diagonal-opposite", "--square-alibi-mask", "--fill-neg-inf")
PARTS = {
    "--scale-emb": [("--scale-emb 12", dict(says="times it")), (f"--scale-emb 12 {MTP}", dict(error="multi-token"))],
    "--embedding-multiplier-scale": [("--embedding-multiplier-scale 2", dict(says="times it"))],
    "--input-embeds-norm": [("--input-embeds-norm", dict(says="sqrt(h)"))],
    "--scale-depth": [("--scale-depth 1.4", dict(says="the number of layers"))],
    "--dim-model-base": [("--dim-model-base 256", dict(says="over the hidden size"))],
    "--output-multiplier-scale": [("--output-multiplier-scale 0.1", dict(says="logits times it"))],
    "--output-logit-softcapping": [
        ("--output-logit-softcapping 30", dict(says="tanh")),
        (f"--output-logit-softcapping 30 {MTP}", dict(error="multi-token")),
    ],
    "--attn-logit-softcapping": [
        ("--attn-logit-softcapping 50", dict(says="capped after their scale")),
        ("--attn-logit-softcapping 50 --context-parallel-size 2", dict(error="has no soft-cap")),
        ("--attn-logit-softcapping 50 --apply-query-key-layer-scaling", dict(error="remove one of the two")),
    ],
    "--position-embedding-type alibi": [
        (ALIBI, dict(position_embedding_type="none", alibi=True, says="slopes times distances")),
        (f"{ALIBI} {MLA}", dict(error="latent attention has its own positions")),
    ],
    "--alibi-fusion-attn-type": [
        (f"{ALIBI} --alibi-fusion-attn-type 2", dict(says="the same values")),
        (f"{ALIBI} --alibi-fusion-attn-type 3", dict(error="valid: 0, 2")),
        ("--alibi-fusion-attn-type 2", dict(says="no effect without --position-embedding-type alibi")),
    ],
    **{flag: [(f"{ALIBI} {flag}", dict(says="the same values"))] for flag in ALIBI_FORMS},
    "--add-rmsnorm-offset": [
        ("--add-rmsnorm-offset --normalization RMSNorm", dict(layernorm_zero_centered_gamma=True)),
        ("--add-rmsnorm-offset", dict(says="no effect")),
    ],
    "--full-attention-interval": [
        (f"{DELTA} --mamba-d-conv 5", DELTA_SETS),
        (f"{DELTA} --experimental-attention-variant dsa", dict(error="asks for other layers")),
        (f"{DELTA} --tensor-model-parallel-size 2", dict(error="give --tensor-model-parallel-size 1")),
        (f"{DELTA} --context-parallel-size 2", dict(error="give --context-parallel-size 1")),
        (f"{DELTA} {MLA}", dict(error="remove --multi-latent-attention")),
        (f"{DELTA} --mtp-num-layers 1", dict(error="remove --mtp-num-layers")),
        (f"{DELTA} --noop-layers 0", dict(error="remove --noop-layers")),
        ("--full-attention-interval 3", dict(error="give --swiglu")),
    ],
    "--no-enable-linear-qkv": [
        (f"{DELTA} --no-enable-linear-qkv", dict(says="the rows of the three")),
        ("--no-enable-linear-qkv", dict(error="none without it; remove the flag")),
    ],
    "--rmsnorm-weight-in-fp32": [
        ("--rmsnorm-weight-in-fp32 --add-rmsnorm-offset --normalization RMSNorm", dict(says="add their offset")),
        ("--rmsnorm-weight-in-fp32 --normalization RMSNorm", dict(says="norms multiply in float32")),
        ("--rmsnorm-weight-in-fp32", dict(says="no effect without --normalization")),
    ],
    "--post-norm": [
        (f"--spec {SPEC}.gemma2_spec layer_spec --post-norm", dict(says="post_mlp_layernorm in every layer")),
        (f"--spec {SPEC}.gemma2_spec s --post-norm --scale-depth 1", dict(error="remove one of the two")),
        ("--post-norm", dict(says="no effect without --spec")),
    ],
    "--interleave-sliding-window": [
        (
            f"--spec {SPEC}.gemma2_spec layer_spec --post-norm --interleave-sliding-window 16",
            dict(window_size=(15, 0), window_attn_skip_freq=2),
        ),
        ("--interleave-sliding-window 16", dict(says="no effect without --spec")),
    ],
    "--sliding-window": [
        ("--sliding-window 16 --seq-length 64", dict(window_size=(16, 0), window_attn_skip_freq=None)),
        ("--sliding-window 64 --seq-length 64", dict(says="no effect")),
        ("--sliding-window 16 --seq-length 64 --reset-attention-mask", dict(error="no mask of documents")),
    ],
}

TURN = "--fix-router --num-experts 8"
O2 = "--o2-optimizer"
BENCHMARKS = {
    "--o2-gradient": [
        ("--o2-gradient --bf16 --no-gradient-accumulation-fusion", dict(grad_reduce_in_bf16=True)),
        ("--o2-gradient", dict(says="no effect without --bf16")),
    ],
    "--o2-optimizer": [
        (O2, dict(says="bfloat16 between steps")),
        (f"{O2} --optimizer sgd", dict(error="give --optimizer adam")),
        (f"{O2} --use-precision-aware-optimizer", dict(error="remove one of the two")),
    ],
    "--gemm-gradient-accumulation-fusion": [
        ("--gemm-gradient-accumulation-fusion --num-experts 8 --moe-grouped-gemm", dict(says="in float32")),
        ("--gemm-gradient-accumulation-fusion --num-experts 8", dict(error="give --moe-grouped-gemm")),
        ("--gemm-gradient-accumulation-fusion", dict(says="no effect without experts")),
    ],
    "--fix-router": [
        (TURN, dict(says="losses mean nothing")),
        (f"{TURN} --moe-expert-capacity-factor 2", dict(error="remove --moe-expert-capacity-factor")),
        ("--fix-router", dict(says="no effect without experts")),
    ],
    "--fix-sub-seq-length": [
        ("--fix-sub-seq-length 8 --reset-attention-mask --seq-length 64", dict(says="documents of 8 tokens")),
        ("--fix-sub-seq-length 80 --reset-attention-mask --seq-length 64", dict(says="no effect outside")),
        ("--fix-sub-seq-length 8", dict(says="no effect without --reset-attention-mask")),
    ],
    "--use-glm-rope": [("--use-glm-rope", dict(rotary_interleaved=True))],
}

EXPERTS = {
    "--first-k-dense-replace": [
        ("--first-k-dense-replace 1 --num-experts 8", dict(moe_layer_freq=[0, 1, 1, 1])),
        ("--first-k-dense-replace 1 --moe-layer-freq 2 --num-experts 8", dict(moe_layer_freq=[0, 0, 1, 0])),
        ("--first-k-dense-replace -1 --moe-layer-freq -1 --num-experts 8", dict(moe_layer_freq=[1, 1, 1, 1])),
        ("--first-k-dense-replace 1", dict(moe_layer_freq=1, says="no effect without experts")),
        (f"--first-k-dense-replace 1 --num-experts 8 --spec {SPEC}.qwen3_spec s", dict(moe_layer_freq=[0, 1, 1, 1])),
    ],
    "--n-shared-experts": [
        ("--n-shared-experts 2 --moe-ffn-hidden-size 96", dict(moe_shared_expert_intermediate_size=192)),
        ("--n-shared-experts 2", dict(moe_shared_expert_intermediate_size=512)),
        ("--n-shared-experts 2 --moe-shared-expert-intermediate-size 100", dict(error="remove one")),
    ],
    "--shared-expert-gate": [("--shared-expert-gate", dict(moe_shared_expert_gate=True))],
    "--shared-expert-gate-output-dimension": [
        ("--shared-expert-gate --shared-expert-gate-output-dimension 64", dict(error="one number for a token"))
    ],
    "--norm-topk-prob": [
        (
            "--norm-topk-prob --moe-router-pre-softmax --moe-router-topk-scaling-factor 2",
            dict(moe_router_pre_softmax=False, moe_router_topk_scaling_factor=None),
        ),
        ("--norm-topk-prob --moe-expert-capacity-factor 1.5", dict(error="remove one of the two")),
        (f"--norm-topk-prob {PRE} none --moe-router-pre-softmax", dict(moe_router_pre_softmax=True, says="not read")),
    ],
    "--seq-aux": [
        (
            f"--seq-aux {PRE} none --moe-aux-loss-coeff 0.01",
            dict(moe_router_load_balancing_type="seq_aux_loss", says="over the whole of each sequence"),
        ),
        (f"--seq-aux {PRE} none", dict(says="coefficient is 0")),
        (f"--seq-aux {PRE} seq_aux_loss --moe-aux-loss-coeff 0.01", dict(says="does not read it")),
    ],
    "--router-gating-in-fp32": [("--router-gating-in-fp32", dict(moe_router_dtype="fp32"))],
    "--topk-softmax-in-fp32": [
        (f"{TOPK_WIDE} --moe-router-pre-softmax", dict(router_softmax_in_fp32="rounded")),
        (
            f"{TOPK_WIDE} --moe-router-load-balancing-type none --moe-router-pre-softmax",
            dict(router_softmax_in_fp32="kept"),
        ),
        (f"{TOPK_WIDE} --norm-topk-prob", dict(says="rounded once")),
        (TOPK_WIDE, dict(says="no effect without --moe-router-pre-softmax")),
        (f"{TOPK_WIDE} --moe-router-score-function sigmoid", dict(says="no effect without softmax")),
        (f"{TOPK_WIDE} --moe-router-load-balancing-type softmax_topk", dict(says="does not read it")),
        (f"{TOPK_WIDE} --moe-router-dtype fp32", dict(says="float32")),
    ],
    "--moe-revert-type-after-topk": [
        (f"{REVERT} --moe-router-load-balancing-type softmax_topk", dict(router_softmax_in_fp32="kept")),
        (f"{REVERT} --moe-router-load-balancing-type softmax_topk --router-gating-in-fp32", dict(says="float32")),
        (REVERT, dict(says="read by softmax_topk alone")),
    ],
    "--moe-device-level-aux-loss-coeff": [
        ("--moe-device-level-aux-loss-coeff 0.1", dict(error="alone has a loss over devices")),
        (f"--moe-device-level-aux-loss-coeff 0.1 {LIMITED}", dict(says="read by group_limited_greedy")),
    ],
    "--moe-comm-aux-loss-coeff": [
        ("--moe-comm-aux-loss-coeff 0.1", dict(error="alone has a loss over devices")),
        (f"--moe-comm-aux-loss-coeff 0.1 {LIMITED}", dict(says="read by group_limited_greedy")),
    ],
    "--enable-expert-placement": [
        (f"{PLACED} --expert-placement-freq 5", dict(says="every 5 iterations")),
        (f"{PLACED} --expert-placement-freq 0", dict(error="--expert-placement-freq is 0")),
        (f"{PLACED} --overlap-param-gather", dict(error="--overlap-param-gather beside it")),
        (f"{PLACED} --optimizer-selection fused_ema_adamw", dict(error="--optimizer-selection beside it")),
        (f"{PLACED} --tensor-model-parallel-size 2", dict(error="give --expert-tensor-parallel-size 1")),
        ("--enable-expert-placement", dict(says="no effect without experts on other ranks")),
    ],
    "--print-expert-load": [
        (f"--print-expert-load {PLACED}", dict(says="tokens of every rank")),
        ("--print-expert-load", dict(says="no effect without experts on other ranks")),
        (
            "--print-expert-load --num-experts 8 --expert-model-parallel-size 2 --tensor-model-parallel-size 2",
            dict(error="give --expert-tensor-parallel-size 1"),
        ),
    ],
    "--balanced-moe-experts": [
        (
            f"{HOT} --moe-token-dispatcher-type alltoall",
            dict(gradient_accumulation_fusion=False, says="of the 3 busiest"),
        ),
        (HOT, dict(error="give --moe-token-dispatcher-type alltoall")),
        (
            f"{HOT} --moe-token-dispatcher-type alltoall --balanced-moe-hot-expert-num 5",
            dict(error="a rank has 4 experts"),
        ),
        (f"{HOT} --moe-token-dispatcher-type alltoall --trans-hot-expert-group-num 0", dict(error="give 1 or more")),
        (
            f"{HOT} --moe-token-dispatcher-type alltoall --moe-zero-memory level0",
            dict(error="--moe-zero-memory beside it"),
        ),
        (
            f"{HOT} --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel",
            dict(error="give --expert-tensor-parallel-size 1"),
        ),
        ("--balanced-moe-experts", dict(says="no effect without experts on other ranks")),
    ],
    f"{PRE} group_limited_greedy": [
        (LIMITED, dict(moe_router_load_balancing_type="aux_loss", moe_router_group_topk=None)),
        (
            f"{LIMITED} --norm-topk-prob --seq-aux --moe-aux-loss-coeff 0.1",
            dict(group_limited=(4, 2, None, (0.1, 0.0, 0.0), True)),
        ),
        (f"{LIMITED} --moe-expert-capacity-factor 1.5", dict(error="drops no token")),
        (LIMITED.replace("group-topk 2", "group-topk 5"), dict(error="8 experts in 4 groups")),
        (f"{PRE} group_limited_greedy --num-experts 8", dict(error="it needs --moe-router-group-topk")),
        (f"{PRE} group_limited_greedy", dict(says="no effect without experts")),
    ],
    "--moe-token-dispatcher-type alltoall_seq": [
        ("--moe-token-dispatcher-type alltoall_seq", dict(moe_token_dispatcher_type="alltoall")),
        (
            "--moe-token-dispatcher-type alltoall_seq --tensor-model-parallel-size 2 --moe-expert-capacity-factor 1",
            dict(error="needs --sequence-parallel"),
        ),
        (
            "--moe-token-dispatcher-type alltoall_seq --tensor-model-parallel-size 2 --moe-expert-capacity-factor 1 "
            "--moe-pad-expert-input-to-capacity --sequence-parallel",
            dict(capacity_over_sequence=True, moe_pad_expert_input_to_capacity=False),
        ),
    ],
    f"{PRE} softmax_topk": [
        (
            f"{PRE} softmax_topk --n-group 4 --topk-group 2",
            dict(moe_router_load_balancing_type="none", moe_router_pre_softmax=True, **UNGROUPED),
        ),
        (f"{PRE} softmax_topk --norm-topk-prob", dict(moe_router_pre_softmax=False)),
    ],
    f"{PRE} pai_megatron_aux_loss": [
        (
            f"{PRE} pai_megatron_aux_loss --moe-router-topk-scaling-factor 2 --n-group 4 --topk-group 2",
            dict(
                moe_router_load_balancing_type="aux_loss",
                moe_router_pre_softmax=True,
                moe_router_topk_scaling_factor=None,
                **UNGROUPED,
            ),
        )
    ],
    "--moe-tp-extend-ep": [
        (
            "--moe-tp-extend-ep --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 8",
            dict(expert_model_parallel_size=4, expert_tensor_parallel_size=1),
        ),
        ("--moe-tp-extend-ep --tensor-model-parallel-size 4 --num-experts 6", dict(error="do not divide")),
    ],
}

FSDP2 = f"--use-torch-fsdp2 --fsdp2-config-path {Path(__file__).parents[1] / 'launch' / 'fsdp2.yaml'}"
PARALLEL = {
    "--fsdp2-config-path": [
        (FSDP2, dict(says="param_dtype = bf16, reduce_dtype = fp32")),
        (FSDP2.removeprefix("--use-torch-fsdp2 "), dict(error="--use-torch-fsdp2; give that too")),
        ("--use-torch-fsdp2 --fsdp2-config-path none", dict(error="No such file")),
        (f"{FSDP2} --recompute-granularity full", dict(says="param_dtype")),
    ],
    "--use-ascend-coc": [
        ("--use-ascend-coc", dict(options={"enable": ["overlap.decompose"]})),
        ("--use-ascend-coc --use-ascend-mc2", dict(error="one of the two")),
    ],
    "--coc-parallel-num": [
        ("--use-ascend-coc --coc-parallel-num 4", dict(options={"enable": ["overlap.decompose"]})),
        ("--coc-parallel-num 4", dict(options={}, says="no effect without --use-ascend-coc")),
    ],
    "--coc-fused-kernel": [("--use-ascend-coc --coc-fused-kernel", dict(options={"enable": ["overlap.decompose"]}))],
    "--coc-mode": [("--use-ascend-coc --coc-mode 1", dict(options={"enable": ["overlap.decompose"]}))],
    "--use-ascend-mc2": [("--use-ascend-mc2", dict(options={"enable": ["overlap.mc2"]}))],
    "--moe-permutation-async-comm": [("--moe-permutation-async-comm", SPEED)],
    "--moe-allgather-overlap-comm": [("--moe-allgather-overlap-comm", SPEED)],
    "--moe-alltoall-overlap-comm": [("--moe-alltoall-overlap-comm", SPEED)],
    "--mla-up-proj-tp-overlap": [("--mla-up-proj-tp-overlap", SPEED)],
    "--disable-gloo-group": [
        ("--disable-gloo-group", dict(enable_gloo_process_groups=False)),
        (
            "--disable-gloo-group --use-distributed-optimizer --ckpt-format torch",
            dict(error="give --ckpt-format torch_dist"),
        ),
    ],
    "--hccl-group-buffer": [
        ("--hccl-group-buffer dp:200;exp:400", dict(says="dp 200, ep 400")),
        ("--hccl-group-buffer tp:300,cp2:20", dict(says="makes no such group: cp2")),
        ("--hccl-group-buffer dp:200;tq:300", dict(error="'tq' is no group (did you mean")),
        ("--hccl-group-buffer dp", dict(error="group:number is expected")),
    ],
    "--hccl-group-buffer-adaptive": [
        ("--hccl-group-buffer-adaptive --micro-batch-size 1", dict(says="ep 200")),
        ("--hccl-group-buffer-adaptive", dict(error="give --micro-batch-size")),
    ],
    "--hccl-ep-group-buffer-adaptive-factor": [
        ("--hccl-ep-group-buffer-adaptive-factor 2.0", dict(says="read by --hccl-group-buffer-adaptive"))
    ],
    "--hccl-op-mode": [
        ("--hccl-op-mode cp:2;ep:2;default_group:2", dict(says="cp 2, ep 2; left to HCCL")),
        ("--hccl-op-mode cp:some", dict(error="group:number is expected")),
    ],
    "--moe-fb-overlap": [
        (f"--moe-fb-overlap {NARROW} {EXCHANGED}", dict(overlap_moe_expert_parallel_comm=True)),
        (f"--moe-fb-overlap {EXCHANGED} --expert-model-parallel-size 2", dict(says="no effect in float32")),
        (f"--moe-fb-overlap {NARROW}", dict(error="give --moe-token-dispatcher-type alltoall")),
        (f"--moe-fb-overlap {NARROW} {EXCHANGED} --pipeline-model-parallel-size 2", dict(error="needs virtual stages")),
        (f"--moe-fb-overlap {EXCHANGED} --schedules-method dualpipev", dict(error="beside --schedules-method")),
    ],
    "--async-log-allreduce": [("--async-log-allreduce", dict(says="Megatron's own reduction"))],
    "--optimize-send-recv-comm": [("--optimize-send-recv-comm", BETWEEN)],
    "--optimize-vpp-send-recv-comm": [("--optimize-vpp-send-recv-comm", BETWEEN)],
    "--context-parallel-algo": [
        ("--context-parallel-algo megatron_cp_algo", dict(context_parallel_algo="megatron_cp_algo", **CONTEXT)),
    ],
    "--ulysses-degree-in-cp": [("--ulysses-degree-in-cp 2", dict(ulysses_degree_in_cp=2, **CONTEXT))],
    "--cp-window-size": [("--cp-window-size 2", dict(cp_window_size=2, **CONTEXT))],
    "--attention-mask-type": [("--attention-mask-type general", dict(attention_mask_type="general", **CONTEXT))],
    "--use-cp-send-recv-overlap": [("--use-cp-send-recv-overlap", dict(use_cp_send_recv_overlap=True, **CONTEXT))],
    "--use-ulysses-allgather-kv": [("--use-ulysses-allgather-kv", dict(use_ulysses_allgather_kv=True, **CONTEXT))],
    "--use-fused-ring-attention-update": [("--use-fused-ring-attention-update", CONTEXT)],
    "--megatron-cp-in-bnsd": [("--megatron-cp-in-bnsd", dict(megatron_cp_in_bnsd=True, **CONTEXT))],
    "--context-parallel-kv-cache-policy": [
        ("--context-parallel-kv-cache-policy full", dict(context_parallel_kv_cache_policy="full", **CONTEXT))
    ],
    "--context-parallel-cache-interval": [
        ("--context-parallel-cache-interval 1", dict(context_parallel_cache_interval=1, **CONTEXT))
    ],
    "--adaptive-cp-dynamic-attn-mask": [("--adaptive-cp-dynamic-attn-mask", CONTEXT)],
    "--adaptive-cp-manually-set-mask-list": [("--adaptive-cp-manually-set-mask-list", CONTEXT)],
    "--adaptive-cp-only-reschedule": [("--adaptive-cp-only-reschedule", CONTEXT)],
    "--adaptive-cp-without-coarse": [("--adaptive-cp-without-coarse", CONTEXT)],
    "--kv-head-repeat-before-uly-alltoall": [("--kv-head-repeat-before-uly-alltoall", CONTEXT)],
    "--use-custom-fsdp": [("--use-custom-fsdp", dict(use_megatron_fsdp=True))],
    "--reset-bucket-group-order": [("--reset-bucket-group-order", dict(says="order of buckets stays"))],
    "--num-layer-list": [
        ("--num-layer-list 1,3 --pipeline-model-parallel-size 2", dict(pipeline_model_parallel_layout="Et|tttL")),
        ("--num-layer-list 1,2 --pipeline-model-parallel-size 2", dict(error="makes 3 layers")),
        ("--num-layer-list 4", dict(error="at least 2")),
    ],
    "--pipeline-num-transformer-layers": [
        (
            "--pipeline-num-transformer-layers [[0,1],[1]*1,[2]] --pipeline-model-parallel-size 3",
            dict(error="lists of one length"),
        ),
        (
            "--pipeline-num-transformer-layers [[0,1],[1,1]*2,[3,0]] --num-layers 8 --pipeline-model-parallel-size 4 "
            "--num-layers-per-virtual-pipeline-stage 1",
            dict(
                pipeline_model_parallel_layout="E|t|t|ttt|t|t|t|L",
                num_layers_per_virtual_pipeline_stage=None,
            ),
        ),
    ],
    "--noop-layers": [
        (
            "--noop-layers 0,7 --num-layers 8 --pipeline-model-parallel-size 2 --mtp-num-layers 1",
            dict(num_layers=6, pipeline_model_parallel_layout="Ettt|tttmL"),
        ),
        (
            "--noop-layers 7 --num-layers 8 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 2 --num-experts 4 --first-k-dense-replace 1",
            dict(
                num_layers=7,
                pipeline_model_parallel_layout="Ett|tt|tt|tL",
                moe_layer_freq=[0, 1, 1, 1, 1, 1, 1],
                num_layers_per_virtual_pipeline_stage=None,
            ),
        ),
        ("--noop-layers 3", dict(num_layers=3)),
        ("--noop-layers 4", dict(error="from 0 to 3")),
        ("--noop-layers 1 --num-layer-list 1,3 --pipeline-model-parallel-size 2", dict(num_layers=3)),
    ],
    "--variable-seq-lengths": [("--variable-seq-lengths", dict(variable_seq_lengths=True))],
}

TWO_STAGES = "--recompute-granularity full --num-layers-per-virtual-pipeline-stage 1"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
WHOLE = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
MEMORY = {
    "--recompute-activation-function": [
        ("--recompute-activation-function", dict(options={"recompute": "activation_function"})),
        (
            "--recompute-activation-function --recompute-norm --optimization-level 1",
            dict(options={"recompute": "activation_function+norm", "level": 1}),
        ),
    ],
    "--recompute-activation-function-num-layers": [
        ("--recompute-activation-function --recompute-activation-function-num-layers 4", dict(says="every layer")),
        (
            "--recompute-activation-function --recompute-activation-function-num-layers 3",
            dict(
                says="the first 3 layers of a stage",
                options={"recompute": {"policy": "activation_function", "layers.3.mlp": "save"}},
            ),
        ),
        (
            "--recompute-activation-function --recompute-activation-function-num-layers 1 --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 2",
            dict(options={"recompute": {"policy": "activation_function", "layers.3.mlp": "save"}}),
        ),
    ],
    "--recompute-norm": [("--recompute-norm", dict(options={"recompute": "norm"}))],
    "--recompute-norm-num-layers": [
        (
            "--recompute-norm --recompute-activation-function --recompute-norm-num-layers 3",
            dict(
                options={
                    "recompute": {
                        "policy": "activation_function+norm",
                        "layers.3.*norm": "save",
                        "layers.3.self_attention.*norm": "save",
                    }
                }
            ),
        )
    ],
    "--enable-recompute-layers-per-pp-rank": [
        ("--enable-recompute-layers-per-pp-rank", dict(says="the same number")),
        (f"--enable-recompute-layers-per-pp-rank {TWO_STAGES} --recompute-method block", dict(says="number i v + s")),
        (f"--enable-recompute-layers-per-pp-rank {TWO_STAGES}", dict(error="give --recompute-method block")),
    ],
    "--swap-attention": [
        (
            "--swap-attention",
            dict(
                options={
                    "memory_budget": 1.0,
                    "offload": True,
                    "recompute": {"layers.*.self_attention": "offload"},
                }
            ),
        ),
        ("--swap-attention --recompute-granularity full", dict(says="recomputed whole keeps none of it")),
        ("--swap-attention --swap-modules post_norm", dict(error="names no part of a layer")),
        (
            "--swap-attention --recompute-norm",
            dict(
                options={
                    "memory_budget": 1.0,
                    "offload": True,
                    "recompute": {"policy": "norm", "layers.*.self_attention": "offload"},
                }
            ),
        ),
    ],
    "--swap-modules": [
        (
            "--swap-attention --swap-modules mlp",
            dict(options={"memory_budget": 1.0, "offload": True, "recompute": {"layers.*.mlp": "offload"}}),
        ),
        ("--swap-attention --swap-modules post_norm", dict(error="names no part of a layer")),
    ],
    "--reuse-fp32-param": [
        ("--reuse-fp32-param --bf16", dict(says="16 bits more", reuse_fp32_param=True)),
        ("--reuse-fp32-param", dict(says="float32, of which there is one copy")),
        ("--reuse-fp32-param --fp16", dict(error="no half of a float32 one")),
        ("--reuse-fp32-param --bf16 --swap-optimizer", dict(error="not done beside --swap-optimizer")),
        *(
            (f"--reuse-fp32-param --bf16 --{name}", dict(error=f"not done beside --{name}, which"))
            for name in ("use-precision-aware-optimizer", "optimizer-cpu-offload", "log-params-norm", "qk-clip")
        ),
        ("--reuse-fp32-param --bf16 --optimizer muon", dict(error="not done for --optimizer muon")),
    ],
    "--swap-optimizer": [
        ("--swap-optimizer", dict(says="a step has 16 parts", swap_optimizer=True)),
        ("--swap-optimizer --swap-optimizer-times 0", dict(error="--swap-optimizer-times 0: expected at least 1")),
        ("--swap-optimizer --async-save", dict(error="not done beside --async-save")),
        ("--swap-optimizer --optimizer-cpu-offload", dict(error="not done beside --optimizer-cpu-offload")),
    ],
    "--swap-optimizer-times": [
        ("--swap-optimizer-times 4", dict(says="no effect without --swap-optimizer")),
        ("--swap-optimizer --swap-optimizer-times 4", dict(says="read by --swap-optimizer", swap_optimizer_times=4)),
    ],
    "--recompute-mla-up-proj": [
        ("--recompute-mla-up-proj", dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])),
        ("--recompute-mla-up-proj --recompute-granularity full", dict(recompute_granularity="full")),
    ],
    "--use-nanopipe-swap": [
        (f"--use-nanopipe-swap --use-nanopipe {VIRTUAL}", dict(says="waits in host memory")),
        ("--use-nanopipe-swap", dict(error="give --use-nanopipe")),
    ],
    "--use-nanopipe": [
        (f"--use-nanopipe {VIRTUAL}", dict(says="while the rank waits", gradient_accumulation_fusion=False)),
        ("--use-nanopipe", dict(error="give --num-layers-per-virtual-pipeline-stage")),
        (f"--use-nanopipe {VIRTUAL} --recompute-in-bubble", dict(error="--recompute-in-bubble beside it")),
        (f"--use-nanopipe {VIRTUAL} --overlap-grad-reduce", dict(error="--overlap-grad-reduce beside it")),
    ],
    "--recompute-in-bubble": [
        (f"--recompute-in-bubble {VIRTUAL}", dict(says="recomputes the others early")),
        ("--recompute-in-bubble", dict(error="give --num-layers-per-virtual-pipeline-stage")),
        (f"--recompute-in-bubble {VIRTUAL} {WHOLE}", dict(error="remove --recompute-granularity")),
        (f"--recompute-in-bubble {VIRTUAL} --swap-attention", dict(error="--swap-attention beside it")),
        (f"--recompute-in-bubble {VIRTUAL} --recompute-in-advance", dict(error="--recompute-in-advance beside it")),
    ],
    "--recompute-in-advance": [
        (f"--recompute-in-advance {VIRTUAL} {WHOLE}", dict(says="before their gradient is waited for")),
        (f"--recompute-in-advance {WHOLE}", dict(error="give --num-layers-per-virtual-pipeline-stage")),
        (f"--recompute-in-advance {VIRTUAL}", dict(error="give --recompute-granularity full and method block")),
    ],
    "--use-multiparameter-pipeline-model-parallel": [
        ("--use-multiparameter-pipeline-model-parallel", dict(says="a stage's list of tensors is sent")),
        (
            "--use-multiparameter-pipeline-model-parallel --num-layers-per-virtual-pipeline-stage 1",
            dict(error="remove the virtual stages"),
        ),
        (
            "--use-multiparameter-pipeline-model-parallel --schedules-method dualpipev",
            dict(error="--schedules-method beside it"),
        ),
    ],
    "--moe-adaptive-recompute-activation": [
        ("--moe-adaptive-recompute-activation --num-experts 4", dict(says="more than 2.0 times its share")),
        ("--moe-adaptive-recompute-activation", dict(says="no effect without --num-experts")),
        (
            "--moe-adaptive-recompute-activation --num-experts 4 --moe-adaptive-recompute-activation-scale 0.0",
            dict(error="a number above 0"),
        ),
        (
            f"--moe-adaptive-recompute-activation --num-experts 4 --moe-zero-memory level0 {EXCHANGED}",
            dict(error="--moe-zero-memory beside it"),
        ),
        (
            f"--moe-adaptive-recompute-activation --num-experts 4 --moe-fb-overlap {NARROW} {EXCHANGED}",
            dict(error="--moe-fb-overlap beside it"),
        ),
        (
            "--moe-adaptive-recompute-activation --num-experts 4 --moe-token-dispatcher-type alltoall_seq",
            dict(error="MindSpeed does not take it beside --moe-token-dispatcher-type alltoall_seq"),
        ),
    ],
    "--moe-zero-memory": [
        (f"--moe-zero-memory level0 {EXCHANGED}", dict(says="level0: experts keep their first product")),
        (f"--moe-zero-memory level1 {EXCHANGED} --recompute-granularity full", dict(says="not recomputed whole")),
        (
            f"--moe-zero-memory level1 {EXCHANGED} --recompute-granularity selective --recompute-modules moe_act",
            dict(error="--recompute-modules moe_act makes the same again"),
        ),
        (f"--moe-zero-memory level0 --moe-fb-overlap {NARROW} {EXCHANGED}", dict(error="--moe-fb-overlap beside it")),
        ("--moe-zero-memory level0", dict(error="give --moe-token-dispatcher-type alltoall")),
    ],
    "--moe-zero-memory-num-layers": [
        (f"--moe-zero-memory level1 --moe-zero-memory-num-layers 2 {EXCHANGED}", dict(says="level1 in 2 layers")),
        (f"--moe-zero-memory level0 --moe-zero-memory-num-layers 2 {EXCHANGED}", dict(says="no effect: level0")),
        ("--moe-zero-memory-num-layers 2", dict(error="give that too")),
    ],
    "--loss-compute-mode": [("--loss-compute-mode chunk", dict(says="chunks"))],
    "--loss-chunk-size": [("--loss-chunk-size 512", dict(says="fusion.linear_cross_entropy"))],
    "--mtp-mem-efficient-logits": [("--mtp-mem-efficient-logits", dict(says="no float32 copy"))],
}

KERNELS = {
    "--use-fused-rmsnorm": [("--use-fused-rmsnorm", dict(options={}, says="fusion.rms_norm"))],
    "--use-fused-swiglu": [("--use-fused-swiglu", dict(options={}, says="fusion.swiglu"))],
    "--use-fused-rotary-pos-emb": [("--use-fused-rotary-pos-emb", dict(options={}, says="fusion.rope"))],
    "--use-fused-moe-token-permute-and-unpermute": [
        ("--use-fused-moe-token-permute-and-unpermute", dict(options={}, says="fusion.moe_permute"))
    ],
    "--use-fusion-attn-v2": [("--use-fusion-attn-v2", LOWERED)],
    "--shape-order": [("--shape-order BNSD", LOWERED)],
    "--sparse-mode": [("--sparse-mode 2", dict(says="from the graph")), ("--sparse-mode 4", dict(error="mode 4"))],
    "--pre-tockens": [
        ("--pre-tockens 1048576", dict(says="every earlier token")),
        ("--pre-tockens 8", dict(error="--window-size 8,0")),
    ],
    "--next-tockens": [("--next-tockens 0", dict(says="no later token")), ("--next-tockens 4", dict(error="remove"))],
    "--mla-fa-without-pad": [("--mla-fa-without-pad", LOWERED)],
    "--mla-fa-divide-qk": [("--mla-fa-divide-qk", LOWERED)],
    "--padded-base-length": [("--padded-base-length 64", LOWERED)],
    "--mla-mm-split": [("--mla-mm-split", dict(says="the projections stay two"))],
    "--optimization-level": [("--optimization-level 0", dict(options={"level": 0}))],
    "--ema-decay": [
        (f"{EMA} --ema-decay 0.9", dict(says="see --optimizer-selection")),
        ("--ema-decay 0.9", dict(says="no effect without --optimizer-selection fused_ema_adamw")),
    ],
    "--optimizer-selection": [
        ("--optimizer-selection fused_torch_adamw", dict(says="the same step")),
        (EMA, dict(says="decay 0.9999")),
        (f"{EMA} --reuse-fp32-param --bf16", dict(error="remove one of the two")),
        (f"{EMA} --ema-decay 1.5", dict(error="valid: 0 to 1")),
        (f"{EMA} --save some", dict(error="averages are saved by --ckpt-format torch")),
        (f"{EMA} --save some --ckpt-format torch", dict(says="ema_model")),
    ],
    "--muon-nesterov": [("--muon-nesterov", dict(muon_use_nesterov=True))],
    "--muon-coefficient-type": [
        ("--muon-coefficient-type quintic --optimizer muon", dict(says="as Megatron has it")),
        ("--muon-coefficient-type aol --optimizer muon", dict(says="aol coefficients")),
        ("--muon-coefficient-type simple", dict(says="no effect without --optimizer muon")),
    ],
    "--muon-scalar-optimizer": [
        ("--muon-scalar-optimizer adam", dict(says="as Megatron has it")),
        ("--muon-scalar-optimizer lion", dict(error="Adam")),
    ],
    "--npu-deterministic": [("--npu-deterministic", dict(says="HCCL_DETERMINISTIC"))],
    "--op-cal-tflops": [
        ("--op-cal-tflops", dict(log_throughput=True, options={"count_flops": True})),
        ("--op-cal-tflops --mindspeed-peak-tflops 0", dict(error="is no rate")),
    ],
    "--ai-framework": [
        ("--ai-framework pytorch", dict(says="PyTorch")),
        ("--ai-framework mindspore", dict(error="PyTorch alone")),
    ],
    "--npu-datadump": [("--npu-datadump", dict(says="modules '*' in ./npu_datadump; chunks run eager"))],
    "--profile": [
        ("--profile", dict(profile=False, mindspeed_profile=True, says="torch.profiler: iterations 10 to 11")),
        ("--profile --profile-level level2 --profile-step-end 12", dict(says="torch_npu's alone: --profile-level")),
        ("--profile --use-pytorch-profiler", dict(profile=True, says="Megatron's own profile")),
        ("--profile --use-pytorch-profiler --profile-with-stack", dict(error="does not read --profile-with-stack")),
        ("--profile --profile-export-type db", dict(error="on cpu give text")),
        ("--profile --profile-step-start 0", dict(error="they count from 1")),
        ("--profile --profile-ranks 4 --world-size 4", dict(error="--profile-ranks 4: the ranks of this run are 0 to")),
    ],
    "--profile-ranks": [("--profile --profile-ranks -1 --world-size 4", dict(profile_ranks=[0, 1, 2, 3]))],
    "--tokenizer-type PretrainedFromHF": [
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path DIR",
            dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="DIR", tokenizer_hf_use_fast=True),
        ),
        ("--tokenizer-type PretrainedFromHF", dict(error="give --tokenizer-name-or-path")),
    ],
    "--tokenizer-name-or-path": [
        ("--tokenizer-name-or-path DIR --tokenizer-type Llama2Tokenizer", dict(says="does not read it")),
        ("--tokenizer-name-or-path DIR --tokenizer-type PretrainedFromHF", dict(tokenizer_model="DIR")),
    ],
    "--tokenizer-not-use-fast": [
        (
            "--tokenizer-not-use-fast --tokenizer-type PretrainedFromHF --tokenizer-name-or-path DIR",
            dict(tokenizer_hf_use_fast=False),
        )
    ],
}

SHARED = {
    "--add-qkv-bias": [("--add-qkv-bias", dict(add_qkv_bias=True))],
    "--q-lora-rank": [("--q-lora-rank 24", dict(q_lora_rank=24))],
    "--kv-lora-rank": [("--kv-lora-rank 24", dict(kv_lora_rank=24))],
    "--v-head-dim": [("--v-head-dim 24", dict(v_head_dim=24))],
    "--linear-key-head-dim": [("--linear-key-head-dim 24", dict(linear_key_head_dim=24))],
    "--linear-value-head-dim": [("--linear-value-head-dim 24", dict(linear_value_head_dim=24))],
    "--linear-num-key-heads": [("--linear-num-key-heads 2", dict(linear_num_key_heads=2))],
    "--linear-num-value-heads": [("--linear-num-value-heads 2", dict(linear_num_value_heads=2))],
    "--padded-vocab-size": [("--padded-vocab-size 128", dict(padded_vocab_size=128))],
    "--experimental-attention-variant": [
        ("--experimental-attention-variant dsa", dict(experimental_attention_variant="dsa"))
    ],
    "--fp8-format": [("--fp8-format hybrid", dict(fp8="hybrid"))],
    "--fp8-recipe": [("--fp8-recipe tensorwise", dict(fp8_recipe="tensorwise"))],
    "--moe-router-dtype": [("--moe-router-dtype fp64", dict(moe_router_dtype="fp64"))],
    "--position-embedding-type": [("--position-embedding-type rope", dict(position_embedding_type="rope"))],
    "--tokenizer-type": [("--tokenizer-type NullTokenizer", dict(tokenizer_type="NullTokenizer"))],
    "--pipeline-model-parallel-layout": [
        ("--pipeline-model-parallel-layout Ett|ttL", dict(pipeline_model_parallel_layout="Ett|ttL"))
    ],
    "--apply-wd-to-qk-layernorm": [("--apply-wd-to-qk-layernorm", dict(apply_wd_to_qk_layernorm=True))],
    "--muon-extra-scale-factor": [("--muon-extra-scale-factor 2", dict(muon_extra_scale_factor=2.0))],
    "--muon-fp32-matmul-prec": [("--muon-fp32-matmul-prec high", dict(muon_fp32_matmul_prec="high"))],
    "--muon-momentum": [("--muon-momentum 0.95", dict(muon_momentum=0.95))],
    "--muon-no-split-qkv": [("--muon-no-split-qkv", dict(muon_split_qkv=False))],
    "--muon-num-ns-steps": [("--muon-num-ns-steps 6", dict(muon_num_ns_steps=6))],
    "--muon-scale-mode": [("--muon-scale-mode unit_rms_norm", dict(muon_scale_mode="unit_rms_norm"))],
    "--muon-tp-mode": [("--muon-tp-mode duplicated", dict(muon_tp_mode="duplicated"))],
}

EFFECTS = {**MODEL, **PARTS, **BENCHMARKS, **EXPERTS, **PARALLEL, **MEMORY, **KERNELS, **SHARED}
