"""Of :mod:`tests.megatron.flags.effects`: flags of memory."""

from tests.megatron.flags.parallel_effects import EXCHANGED

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
    "--swap-layer-input": [
        (
            "--swap-layer-input",
            dict(
                options={
                    "memory_budget": 1.0,
                    "offload": True,
                    "recompute": {f"decoder.layers.{n}": "offload_input" for n in range(3)},
                }
            ),
        ),
        ("--swap-layer-input --pipeline-model-parallel-size 4", dict(says="no effect: a rank has one layer")),
        ("--swap-layer-input --pipeline-model-parallel-size 2", dict(says="what a stage received stays")),
        (
            "--swap-layer-input --swap-attention",
            dict(
                options={
                    "memory_budget": 1.0,
                    "offload": True,
                    "recompute": {
                        "layers.*.self_attention": "offload",
                        **{f"decoder.layers.{n}": "offload_input" for n in range(3)},
                    },
                }
            ),
        ),
    ],
    "--smart-swap": [
        ("--smart-swap", dict(says="less 2 GiB", options={"memory_budget": 1.0, "offload": True})),
        (
            "--smart-swap --recompute-norm",
            dict(options={"memory_budget": 1.0, "offload": True, "recompute": {"policy": "norm"}}),
        ),
        ("--smart-swap --use-torch-fsdp2", dict(error="beside --use-torch-fsdp2, whose gathered weights")),
    ],
    "--adaptive-memory-optimization": [
        ("--adaptive-memory-optimization", dict(says="waits in", options={"memory_budget": 1.0, "offload": True})),
        ("--adaptive-memory-optimization --use-torch-fsdp2", dict(error="whose gathered weights")),
    ],
    "--adaptive-recompute-device-size": [
        ("--adaptive-recompute-device-size 512", dict(says="512 MiB have", options={"memory_budget": 1.0})),
        ("--adaptive-recompute-device-size 0", dict(says="no effect")),
        ("--adaptive-recompute-device-size 512 --use-torch-fsdp2", dict(error="whose gathered weights")),
    ],
    "--adaptive-recompute-device-swap": [
        ("--adaptive-recompute-device-swap", dict(says="is made again", options={"memory_budget": 1.0})),
        ("--adaptive-recompute-device-swap --swap-layer-input", dict(says="is made again")),
        ("--adaptive-recompute-device-swap --use-torch-fsdp2", dict(error="whose gathered weights")),
    ],
    "--adaptive-recompute-profiling-step": [
        ("--adaptive-recompute-profiling-step 5", dict(says="nothing is profiled")),
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
        (f"--moe-zero-memory level0 --moe-fb-overlap {EXCHANGED}", dict(says="level0: experts keep their first")),
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
