"""Of :mod:`tests.megatron.flags.effects`: flags of parallel layouts, kernels, and those of several at once."""

from pathlib import Path

CONTEXT = dict(says="context parallel size 1")
SPEED = dict(says="overlap.schedule")
EXCHANGED = "--moe-token-dispatcher-type alltoall"
LAUNCH = Path(__file__).parents[1] / "launch"
LAYERZERO = f"--layerzero --layerzero-config {LAUNCH / 'layerzero.yaml'} --untie-embeddings-and-output-weights"
TWO_DIMENSIONS = """--tp-2d --tp-x 2 --tp-y 2 --tensor-model-parallel-size 4 --disable-bias-linear
    --normalization RMSNorm"""
V_SHAPE = "--schedules-method dualpipev --pipeline-model-parallel-size 2"
NARROW = "--bf16 --expert-model-parallel-size 2"
LOWERED = dict(says="lowered")
BETWEEN = dict(says="between stages")
EMA = "--optimizer-selection fused_ema_adamw"

FSDP2 = f"--use-torch-fsdp2 --fsdp2-config-path {LAUNCH / 'fsdp2.yaml'}"
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
            "--disable-gloo-group --use-distributed-optimizer --ckpt-format torch --hccl-slice-size 4096",
            dict(enable_gloo_process_groups=False, says="gathered 4096 numbers of a rank at a time"),
        ),
        (
            "--disable-gloo-group --use-distributed-optimizer --ckpt-format torch --hccl-slice-size 0",
            dict(error="a number of weights from 1 is expected"),
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
        (f"--moe-fb-overlap {NARROW} {EXCHANGED}", dict(options={"codegen": "eager"}, says="take turns at the waits")),
        ("--moe-fb-overlap --pipeline-model-parallel-size 2", dict(error="needs virtual stages")),
        (f"--moe-fb-overlap {V_SHAPE}", dict(options={"codegen": "eager"}, says="take turns at the waits")),
        ("--moe-fb-overlap --overlap-moe-expert-parallel-comm", dict(error="Megatron's own way of eager layers")),
    ],
    "--schedules-method": [
        (V_SHAPE, dict(num_virtual_stages_per_pipeline_rank=2, options={}, says="rank r has stages r and 3 - r")),
        (
            f"{V_SHAPE} --noop-layers 3",
            dict(pipeline_model_parallel_layout="Et|t|t|L", num_virtual_stages_per_pipeline_rank=None),
        ),
        (
            f"{V_SHAPE} --dualpipev-dw-detach",
            dict(gradient_accumulation_fusion=False, options={"codegen": "eager"}, says="late gradients of weights"),
        ),
        ("--schedules-method dualpipev", dict(error="give --pipeline-model-parallel-size")),
        ("--schedules-method dualpipev --pipeline-model-parallel-size 3", dict(error="4 layers do not divide over 6")),
        (f"{V_SHAPE} --num-layers-per-virtual-pipeline-stage 1", dict(error="virtual-pipeline-stage beside it")),
        (f"{V_SHAPE} --overlap-grad-reduce", dict(says="rank r has stages r and")),
        (f"{V_SHAPE} --overlap-grad-reduce --dualpipev-dw-detach", dict(error="--dualpipev-dw-detach beside it")),
        (f"{V_SHAPE} --overlap-param-gather", dict(error="--overlap-param-gather")),
        (f"{V_SHAPE} --variable-seq-lengths", dict(says="rank r has stages r and 3 - r")),
        (f"{V_SHAPE} --dualpipev-dw-detach --reuse-fp32-param --bf16", dict(error="--reuse-fp32-param beside")),
    ],
    "--tp-2d": [
        (TWO_DIMENSIONS, dict(says="2 times 2 ranks")),
        ("--tp-2d --tp-x 2 --tp-y 2", dict(error="is not --tensor-model-parallel-size 1")),
        (f"{TWO_DIMENSIONS} --tp-x 4 --tp-y 1", dict(says="4 times 1 ranks")),
        (f"{TWO_DIMENSIONS} --num-experts 4", dict(error="--num-experts beside it")),
        (TWO_DIMENSIONS.replace("RMSNorm", "LayerNorm"), dict(error="give --normalization RMSNorm")),
        (f"{TWO_DIMENSIONS} --pipeline-model-parallel-size 2", dict(says="2 times 2 ranks")),
        (f"{TWO_DIMENSIONS} --save some --ckpt-format torch_dist", dict(says="2 times 2 ranks")),
        (f"{TWO_DIMENSIONS} --save some --ckpt-format zarr", dict(error="give --ckpt-format torch or torch_dist")),
        (f"{TWO_DIMENSIONS} --context-parallel-size 2", dict(says="2 times 2 ranks")),
        (f"{TWO_DIMENSIONS} --seq-length 6", dict(error="--seq-length 6 does not divide over 4")),
    ],
    "--layerzero": [
        (f"{LAYERZERO} --use-distributed-optimizer", dict(use_torch_fsdp2=True, use_distributed_optimizer=False)),
        ("--layerzero", dict(error="give --layerzero-config")),
        (f"{LAYERZERO} --fp16", dict(error="give --bf16")),
    ],
    "--mla-swap-core-attn-out": [
        (
            "--mla-swap-core-attn-out --multi-latent-attention",
            dict(
                options={
                    "memory_budget": 1.0,
                    "offload": True,
                    "recompute": {"layers.*.self_attention.core_attention": "offload"},
                }
            ),
        ),
        ("--mla-swap-core-attn-out", dict(error="give --multi-latent-attention")),
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
    "--fp8-recipe mxfp8-32x32": [
        ("--fp8-recipe mxfp8-32x32", dict(fp8_recipe="mxfp8-32x32", says="--fp8-format is e4m3"))
    ],
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
