"""As effects.py, of DeepSeek-V4's flags."""

from tests.megatron.flags.effects import SPEC

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
