"""As effects.py, of flags that divide or describe whole models."""

from tests.megatron.flags.effects import MLA

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


MODEL_EFFECTS = {**UNALIGNED}
