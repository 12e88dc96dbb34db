"""As effects.py, of DeepSeek-V4's flags."""

from tests.megatron.flags.layer_effects import PRE, SPEC

WINDOW, LENGTH = 5, 16
SCORES = "--moe-router-score-function sqrtsoftplus --moe-router-load-balancing-type none --seq-aux"
WITHOUT_SPEC = (
    "--multi-latent-attention --q-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --num-experts 8 --qk-layernorm "
    "--enable-mhc --hc-mult 3 --hc-sinkhorn-iters 4 --kv-compress --compress-ratios 0 4 6 4 --enable-dsa-indexer "
    "--index-n-heads 8 --index-head-dim 8 --index-topk 2 --indexer-loss-coeff 0.7 --sliding-window-size 5 --o-groups 2 "
    "--o-lora-rank 6 --rope-theta 100 --compress-rope-theta 500 --rope-factor 4 --original-seq-len 64 --beta-fast 8 "
    f"--beta-slow 1 --hidden-dropout 0 --attention-dropout 0 --disable-bias-linear --normalization RMSNorm {SCORES} "
    "--moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01 --swiglu --position-embedding-type deepseek4"
)
DEEPSEEK4 = f"--spec {SPEC}.deepseek4_spec layer_spec {WITHOUT_SPEC} --num-layers 4 --n-hash-layers 1"

ALONE = "only layers of deepseek4_spec have it"
SQUARE_ROOTS = "--moe-router-score-function sqrtsoftplus --num-experts 4"
NEEDED = (
    "--multi-latent-attention --q-lora-rank --num-experts --qk-layernorm --enable-mhc --kv-compress "
    "--enable-dsa-indexer --compress-ratios"
).split()
ABSENT = {
    "--hidden-dropout 0.1": "--hidden-dropout 0",
    "--attention-dropout 0.1": "--attention-dropout 0",
    "--add-qkv-bias": "no --add-qkv-bias",
    "--reset-attention-mask": "no --reset-attention-mask",
    "--variable-seq-lengths": "no --variable-seq-lengths",
    "--first-k-dense-replace 1": "experts in every layer",
    "--index-topk-pattern CCCC": "no --index-topk-pattern",
    "--moe-model-type deepspeed_moe": "remove --moe-model-type deepspeed_moe",
    "--index-topk-freq 2": "remove --index-topk-freq",
    "--indexer-qk-quant-scheme mxfp8": "no --indexer-qk-quant-scheme",
    "--experimental-attention-variant dsa": "no --experimental-attention-variant",
    "--normalization LayerNorm": "give --normalization RMSNorm",
    "--tensor-model-parallel-size 2": "give --sequence-parallel",
    "--context-parallel-size 2": "give --context-parallel-algo kvallgather_cp_algo",
    "--recompute-granularity selective": "give --recompute-granularity full",
    "--compress-ratios 0 4": "4 numbers are expected",
    "--compress-ratios 0 4 4 -1": "4 numbers are expected",
    "--bf16 --reuse-fp32-param": "remove --reuse-fp32-param",
    "--position-embedding-type rope": "give --position-embedding-type deepseek4",
}


def without(flag: str) -> str:
    """The runs' words but for one flag and its values, if it is there."""
    first, *rest = DEEPSEEK4.split(f"{flag} ", 1)
    return first + rest[0][rest[0].index("--") :] if rest else first


RUNS_OF_SPEC = [
    (DEEPSEEK4, dict(spec=None, mindspeed_layers="deepseek4", ratios_of_layers=[0, 4, 6, 4], table_layers=1)),
    (
        f"{without('--compress-ratios')} --compress-ratios 0 4 6 --noop-layers 3",
        dict(ratios_of_layers=[0, 4, 6], num_layers=3),
    ),
    *((without(flag), dict(error=f"give {flag}")) for flag in NEEDED),
    *((f"{without(words.split()[0])} {words}", dict(error=error)) for words, error in ABSENT.items()),
]
EFFECTS = {
    "--position-embedding-type deepseek4": [
        (DEEPSEEK4, dict(position_embedding_type="rope")),
        ("--position-embedding-type deepseek4", dict(error=ALONE)),
    ],
    "--kv-compress": [(DEEPSEEK4, dict(says="tokens are pooled")), ("--kv-compress", dict(error=ALONE))],
    "--enable-mhc": [
        (DEEPSEEK4, dict(streams_between_stages=3)),
        (f"{DEEPSEEK4} --hc-sinkhorn-iters 0", dict(error="at least 1")),
        ("--enable-mhc", dict(error=ALONE)),
    ],
    "--mtp-spec": [
        (f"{DEEPSEEK4} --mtp-num-layers 1 --mtp-spec {SPEC}.deepseek4_spec mtp_spec", dict(says="their window alone")),
        (f"--mtp-spec {SPEC}.deepseek4_spec mtp_spec", dict(error=ALONE)),
        (f"{DEEPSEEK4} --mtp-spec mine.layers spec", dict(error="valid: one of deepseek4_spec")),
    ],
    "--n-hash-layers": [
        (DEEPSEEK4, dict(says="the first 1 layers")),
        ("--n-hash-layers 2", dict(error="give --moe-router-score-function sqrtsoftplus")),
        (f"--n-hash-layers 2 {SQUARE_ROOTS} {PRE} none", dict(error=ALONE)),
    ],
    "--moe-router-score-function sqrtsoftplus": [
        (
            f"{SQUARE_ROOTS} {PRE} none --seq-aux --moe-aux-loss-coeff 0.1",
            dict(
                moe_router_score_function="sigmoid",
                square_root_scores=True,
                moe_router_load_balancing_type="seq_aux_loss",
            ),
        ),
        (SQUARE_ROOTS, dict(error="no loss of type aux_loss")),
        (f"{SQUARE_ROOTS} {PRE} none --moe-expert-capacity-factor 1", dict(error="remove --moe-expert-capacity")),
    ],
    "--swiglu-limit": [
        ("--swiglu --swiglu-limit 0.5", dict(activation_func_clamp_value=0.5, bias_swiglu_fusion=False)),
        ("--swiglu-limit 0.5", dict(says="no effect without --swiglu")),
        (
            "--swiglu --swiglu-limit 0.5 --moe-shared-expert-overlap",
            dict(error="remove --moe-shared-expert-overlap"),
        ),
    ],
}
"""Flag -> its runs."""
MORE_RUNS = {
    "--spec mindspeed_llm": RUNS_OF_SPEC,
    "--enable-dsa-indexer": [(DEEPSEEK4, dict(says="an indexer chooses"))],
}
"""Flag -> further runs of it."""
