"""Of :mod:`tests.megatron.flags.effects`: flags of models, of their parts and of experts."""

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
    "--quant-states": [
        ("--quant-states fp8", dict(says="128 with a scale")),
        ("--quant-states mxfp8", dict(says="32 with a scale")),
        ("--quant-states hif8", dict(error="give fp8 or mxfp8")),
        ("--quant-states fp8 --optimizer sgd", dict(error="give --optimizer adam")),
        (f"--quant-states fp8 {O2}", dict(error="--o2-optimizer keeps moments in its own way")),
        ("--quant-states fp8 --swap-optimizer", dict(error="--swap-optimizer keeps moments")),
        ("--quant-states fp8 --use-torch-fsdp2", dict(error="--use-torch-fsdp2 keeps moments")),
        ("--quant-states fp8 --use-precision-aware-optimizer", dict(error="remove one of the two")),
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
