"""Flags by what becomes of them: each name with a value to try, and the words that its line must hold."""

REFUSED = {
    "remove": """
    --use-triton-swiglu-limit --aiqos
    --dist-train --attention-mask-on-cpu --output-layer-slice-num=3
    --skip-bias-add
    --use-ema
    """,
    "--spec": """
    --no-post-layer-norm --share-kvstates
    --input-layernorm-in-fp32 --cla-share-factor=3
    """,
    "--moe-input-jitter-eps": """
    --input-jitter
    """,
    "--swiglu": """
    --fc-type=some
    """,
    "TransformerEngine": """
    --fp8-format=hif8 --fp8-recipe=groupwise --fp8-reuse-quantized-weight
    --te-comparison-with-bf16 --te-comparison-with-cpu --te-gmm-mode=performance
    """,
    "overlap.mc2_experts": """
    --moe-alltoall-mc2 --moe-bmm-mc2
    """,
    "--moe-router-load-balancing-type global_aux_loss": """
    --use-global-aux-loss
    """,
    "--moe-router-dtype fp32": """
    --moe-router-dtype=fp8
    """,
    "--tensor-model-parallel-size": """
    --use-nd-matmul
    """,
    "--use-distributed-optimizer": """
    --enable-zero3
    """,
    "--ddp-pad-buckets-for-high-nccl-busbw": """
    --param-and-grad-buffer-pad=2
    """,
    "--pipeline-model-parallel-layout": """
    --layerwise-disaggregated-training
    """,
    "memory_budget": """
    --automated-pipeline --mla-zero-memory
    --moe-unperm2-mem-optim-swap --compress-activation=some --compress-dense=level0
    """,
    "mindspeed-fx plan": """
    --automated-pipeline-perf --auto-settings
    """,
    "--optimizer-cpu-offload": """
    --virtual-optimizer=some --compress-optimizer
    """,
    "--grad-reduce-in-bf16": """
    --quant-grads
    """,
    "--fp8-format": """
    --no-use-gmm-fp8
    """,
    "--bf16": """
    --qat-scheme=some --qad-enable
    """,
    "set_compile_mode": """
    --jit-compile
    """,
    "give the settings as flags": """
    --additional-config=some
    """,
    "--save": """
    --ttp-enabled --enable-high-availability
    """,
    "--tokenizer-model": """
    --tokenizer-type=MagistralTokenizer
    """,
    "fine-tuning": """
    --stage=sft --is-instruction-dataset --is-pairwise-dataset --full-shuffle-instruction-dataset --no-shuffle
    --pack --neat-pack --padded-samples --pad-to-multiple-of=10 --no-pad-to-seq-lengths --cut-max-seqlen
    --no-cut-token --dataset-additional-keys=some --prompt-type=some --prompt-type-path=some --enable-thinking=some
    --drop-thinking=some --reasoning-effort=some --reward-tokens=some --load-checkpoint-loosely
    --lora-target-modules=some --lora-load=some --lora-r=18 --lora-alpha=34 --lora-modules-to-save=some
    --lora-register-forward-hook=some --lora-fusion --lora-ckpt-filter --lu-lora-final-layer-index=2
    --lu-lora-lr=0.50000125 --lu-lora-lr-ratio=1.5 --dpo-beta=0.6 --dpo-label-smoothing=0.5 --dpo-loss-type=some
    --pref-ftx=0.5 --ref-model=some --refer-model-iter=3 --use-wandb
    """,
    "evaluation": """
    --task=some --task-data-path=some --use-kv-cache
    """,
}
"""Words of the way out -> flags that are an error."""

SETTINGS = {
    "--profile": """
    --profile-level=level1 --profile-record-shapes --profile-with-cpu --profile-with-memory
    --profile-with-stack --profile-data-simplification --profile-save-path=some --profile-export-type=db
    """,
    "--enable-dsa-indexer": """
    --apply-rope-no-in-complex --index-n-heads=66 --index-head-dim=130 --index-topk=2050 --index-topk-freq=3
    --index-topk-pattern=some --index-skip-topk-offset=4 --index-share-for-mtp-iteration --indexer-loss-coeff=1.5
    --indexer-qk-quant-scheme=some --no-use-sparse-c8-indexer --scale-fmt=some
    --max-batch-size=6
    """,
    "--full-attention-interval": """
    --use-triton-gdn --mamba-chunk-size=258 --mamba-d-conv=6 --mamba-d-ssm=2 --mamba-expand=3
    """,
    "--kv-compress": """
    --compress-rope-theta=40000.5 --rope-theta=10000.5 --rope-factor=4.5 --original-seq-len=65538
    --sliding-window-size=130 --o-groups=10 --o-lora-rank=1026 --compress-ratios=2
    """,
    "--enable-mhc": """
    --hc-eps=0.500001 --hc-mult=6 --hc-sinkhorn-iters=22 --use-fused-mhc --use-triton-mhc
    """,
    "--moe-model-type": """
    --moe-no-drop --moe-use-sinkhorn --moe-train-capacity-factor=1.5
    """,
    "--use-pipe-experts": """
    --pipe-experts-multi-data=3 --pipe-experts-multi-stream
    """,
    "--ampipe-degree": """
    --ampipe-tp-sp-comm-overlap
    """,
    "--balanced-moe-experts": """
    --balanced-moe-hot-expert-num=5 --trans-hot-expert-group-num=5
    """,
    "--enable-expert-placement": """
    --expert-placement-freq=52 --enable-fine-grained-expert-placement --fine-grained-expert-placement-thre=0.58
    """,
    "--disable-gloo-group": """
    --hccl-slice-size=10485762
    """,
    "--aiqos": """
    --aiqos-enable-roce --aiqos-mode=some --aiqos-schedule=some
    """,
    "--tp-2d": """
    --tp-x=3 --tp-y=3 --enable-overlap-ag-with-matmul --enable-overlap-matmul-with-rs
    --enable-backward-overlap-ag-with-matmul
    """,
    "--use-nd-matmul": """
    --nd1-dim1-size=3 --nd2-dim1-size=3
    """,
    "--layerzero": """
    --layerzero-config=some
    """,
    "--schedules-method": """
    --dualpipev-dw-detach
    """,
    "--automated-pipeline": """
    --save-memory-ratio=0.7 --recompute-module-list=some --recompute-type=4
    """,
    "--automated-pipeline-perf": """
    --optimized-mbs-list=some --optimized-mbs-mode --pp-schedule-list=some --mbs-idx=2
    """,
    "--moe-adaptive-recompute-activation": """
    --moe-adaptive-recompute-activation-scale=2.5
    """,
    "--qat-scheme": """
    --qat-quant-block-size=2
    """,
    "--qad-enable": """
    --no-qad-enable --qad-teacher-load=some --kl-loss-reduction=sum --kl-loss-weight=1.5 --kl-temperature=1.5
    """,
    "--auto-settings": """
    --auto-settings-log-level=some --auto-settings-ranks=10 --auto-settings-type=some --auto-settings-work-dir=some
    --master-addr=some --master-port=29502 --nnodes=3 --node-rank=2 --nproc-per-node=3 --prof-file=some
    --target-nnodes=3
    """,
    "--ttp-enabled": """
    --ttp-dump-dir=some --ttp-dump-timeout-seconds=62 --ttp-heartbeat-interval-ms=1002
    --ttp-heartbeat-timeout-ms=3002 --ttp-max-dump-ckpt-to-keep=3 --ttp-max-missed-count=5 --ttp-save-optimizer
    --ttp-save-rng --ttp-server-ip=some --ttp-server-port=29502 --ttp-wait-dump-file-timeout=62
    """,
    "--enable-high-availability": """
    --enable-elastic-training --enable-hbmfault-repair --enable-worker-reboot --distributed-optimizer-no-replica
    """,
}
"""Flag -> its settings, which share its fate and have no effect without it."""

OWN = """
    --enable-hf2mg-convert --enable-mg2hf-convert --only-convert-last-checkpoint --save-layer-by-layer
    --save-lora-to-hf --model-type-hf=some --hf-cfg-dir=some --hf-save-dir=some --mg-save-dir=some
    --handler-name=some --dataset-impl=some --datasets=some --dataset-dir=some --cache-dir=some --overwrite-cache
    --hf-datasets-params=some --script-data-dir=some --json-keys=some --map-keys={} --merge-group-keys=some
    --output-prefix=some --append-eod --keep-newlines --split-sentences --n-subs=3 --workers=3 --streaming
    --max-samples=2 --mix-strategy=some --interleave-probs=some --pad-vocab-size-to=2 --tokenizer-padding-side=some
    --enable-share-memory --no-shared-storage --evaluation-batch-size=3 --eval-language=some --max-eval-samples=2
    --instruction-template=some --alternative-prompt --origin-postprocess --chain-of-thought --no-chat-template
    --hf-chat-template --add-eos-token=some --broadcast --greedy --history-turns=5 --max-length=258
    --max-new-tokens=130 --temperature=1.2 --top-k=52 --top-p=1.45
"""
"""MindSpeed-LLM's own work: accepted, with a line."""
