"""Models of Megatron-LM's pretrain_gpt.py: one graph per chunk, and the losses and gradient norms of Megatron eager."""

import json
import re
from argparse import Namespace

import pytest

from mindspeed_fx.megatron.training import habits
from tests.megatron.launch import runner

SMALL = """
--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
--global-batch-size 4 --train-iters 2 --lr 1e-3 --min-lr 1e-4 --mock-data --tokenizer-type NullTokenizer
--vocab-size 63 --make-vocab-size-divisible-by 16 --transformer-impl local --eval-iters 1 --eval-interval 100
--log-interval 1 --attention-dropout 0 --hidden-dropout 0
""".split()
MODERN = """
--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights
""".split()
MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8"
LOGGED = re.compile(r"((?:mtp_\d+|\w*load_balancing|z)[ _]loss): ([0-9.E+-]+)")


def shorter(flags):
    """``flags`` with one layer, unless they say how many."""
    return flags if "--num-layers" in flags else f"--num-layers 1 {flags}"


def train(flags, world, compiled):
    switch = {"MINDSPEED_FX_OPTIONS": '{"codegen": "eager"}'} if compiled else {"MINDSPEED_FX_COMPILE": "0"}
    result = runner.run(SMALL + shorter(flags).split(), world, environ=switch)
    assert result.error is None, result.error
    return result


def logged(result):
    """What Megatron logs beside the loss, of each iteration: losses of experts and of tokens ahead."""
    return [(name, float(value)) for output in result.output for name, value in LOGGED.findall(output)]


def compare(flags, world=1, compiled_flags="", extra=0):
    """Train eager and compiled.

    Args:
        flags: of both.
        world: ranks.
        compiled_flags: of the compiled run alone.
        extra: losses that Megatron logs in an iteration, beside that of the model.
    """
    expected = train(flags, world, compiled=False)
    result = train(f"{flags} {compiled_flags}", world, compiled=True)
    assert sum(result.chunks) > 0
    assert result.graphs == [2 * chunks for chunks in result.chunks], result.breaks  # training and evaluation
    assert sorted(expected.losses) == sorted(expected.grad_norms) == [1, 2]
    for iteration, losses in expected.losses.items():
        assert result.losses[iteration] == pytest.approx(losses, rel=1e-5)
        assert result.grad_norms[iteration] == pytest.approx(expected.grad_norms[iteration], rel=1e-5)
    assert len(logged(expected)) == 2 * extra
    for (name, value), (expected_name, expected_value) in zip(logged(result), logged(expected), strict=True):
        assert name == expected_name and value == pytest.approx(expected_value, rel=1e-5) and value > 0


def modern(flags):
    return " ".join(MODERN) + " " + flags


@pytest.mark.slow
def test_dropless_experts_on_two_ranks():
    flags = f"{MOE} --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap"
    compare(modern(f"{flags} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"), world=2, extra=1)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"])
def test_gradients_of_experts_on_two_ranks_are_added_to_main_grad(more):
    flags = f"{MOE} --expert-model-parallel-size 2 --moe-grouped-gemm --gemm-gradient-accumulation-fusion {more}"
    compare(modern(flags), world=2)


def test_latent_attention_with_multi_token_prediction():
    compare(modern(f"{LATENT} --q-lora-rank 24 --v-head-dim 12 --qk-layernorm --mtp-num-layers 1"), extra=1)


REFUSED = {
    "--moe-token-dispatcher-type flex": {"moe_token_dispatcher_type": "flex"},
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(flag):
    habits.refuse(Namespace())
    with pytest.raises(ValueError, match=flag):
        habits.refuse(Namespace(**REFUSED[flag]))


def test_recomputed_activations_of_grouped_experts_are_left_to_the_compiler():
    args = Namespace(moe_grouped_gemm=True, recompute_modules=["moe_act", "mlp"])
    assert "without moe_act" in habits.settle(args)[-1]
    assert args.recompute_modules == ["mlp"] and not args.moe_grouped_gemm


ONE_RANK = {
    "recompute-full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recompute-block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "recompute-modules": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp",
    "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "documents-of-one-length": f"--reset-attention-mask --fix-sub-seq-length 12 --fix-router {MOE}",
    "glm-rope": "--use-glm-rope --rotary-percent 0.5",
    "caps-and-scales": "--attn-logit-softcapping 2 --output-logit-softcapping 2 --scale-depth 1.4 --scale-emb 3",
    "latent-yarn": f"{LATENT} --v-head-dim 12 --rope-type yarn --rotary-scaling-factor 4",
    "latent-recompute": f"{LATENT} --v-head-dim 8 --recompute-granularity selective --recompute-modules mla_up_proj",
    "qk-norm-window": "--qk-layernorm --window-size 8,0",
    "softmax-learnable": "--softmax-type learnable",
    "softmax-off-by-one": "--softmax-type off-by-one --add-qkv-bias",
    "dense-first": f"--num-layers 2 --moe-layer-freq [0,1] {MOE}",
    "sinkhorn": f"{MOE} --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
}
OLD = {
    "gelu-bias-learned": "--position-embedding-type learned_absolute",
    "squared-relu-none": "--squared-relu --no-bias-gelu-fusion --position-embedding-type none",
    "tied-ahead": "--mtp-num-layers 2 --position-embedding-type rope",
}
STAGES = {
    "first": "--num-layers 3 --decoder-first-pipeline-num-layers 1",
    "last": "--num-layers 3 --decoder-last-pipeline-num-layers 1",
    "layout": "--num-layers 3 --pipeline-model-parallel-layout Et|ttL",
    "embedding": "--num-layers 3 --account-for-embedding-in-pipeline-split",
    "ahead": "--num-layers 2 --mtp-num-layers 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_RANK)
def test_one_rank(case):
    compare(modern(ONE_RANK[case]))


@pytest.mark.slow
@pytest.mark.parametrize("case", OLD)
def test_biases_and_tied_embeddings(case):
    compare(OLD[case], extra=OLD[case].count("mtp") * 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGES)
def test_stages(case):
    compare(modern(f"--pipeline-model-parallel-size 2 {STAGES[case]}"), world=2, extra=STAGES[case].count("mtp"))


@pytest.mark.slow
def test_tied_embeddings_on_two_stages_with_tokens_ahead():
    flags = "--num-layers 2 --mtp-num-layers 1 --position-embedding-type rope"
    compare(f"{flags} --pipeline-model-parallel-size 2", world=2, extra=1)


@pytest.mark.slow
def test_experts_with_biases_on_two_ranks():
    flags = f"{MOE} --swiglu --no-bias-swiglu-fusion --untie-embeddings-and-output-weights"
    compare(f"{flags} --expert-model-parallel-size 2", world=2)


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["moe", "shared_experts", "moe_act --moe-grouped-gemm"])
def test_recomputed_experts(modules):
    flags = f"{MOE} --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16"
    recompute = f"--recompute-granularity selective --recompute-modules {modules}"
    compare(modern(flags), world=2, compiled_flags=recompute)


TWO_RANKS = {
    "allgather": "--moe-token-dispatcher-type allgather --expert-model-parallel-size 2",
    "expert-tensor-parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "expert-tensor-parallel-allgather": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--moe-token-dispatcher-type allgather",
    "tensor-and-expert-parallel": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap",
    "shared-expert": "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16",
    "grouped-gemm": "--expert-model-parallel-size 2 --moe-grouped-gemm",
    "capacity": "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0",
    "padded": "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "sigmoid-bias-groups": "--num-layers 2 --moe-layer-freq [0,1] --expert-model-parallel-size 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2 "
    "--moe-router-group-topk 1 --moe-router-dtype fp32",
    "seq-aux": "--expert-model-parallel-size 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2",
    "global-aux": "--expert-model-parallel-size 2 --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 1e-2",
    "z-loss": "--expert-model-parallel-size 2 --moe-z-loss-coeff 1e-2",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO_RANKS)
def test_experts_on_two_ranks(case):
    compare(modern(f"{MOE} {TWO_RANKS[case]}"), world=2, extra=int(case.split("-")[-1] in ("aux", "loss")))


WHOLE_SCRIPTS = {
    "ring-of-documents": "--num-layers 2 --context-parallel-size 2 --context-parallel-algo megatron_cp_algo "
    "--group-query-attention --num-query-groups 2 --qk-layernorm --reset-attention-mask --reset-position-ids "
    "--eod-mask-loss --use-distributed-optimizer",
    "yarn-padded-experts": f"{MOE} --num-layers 2 --rope-scaling-type yarn --rope-scaling-factor 4 "
    "--rope-scaling-original-max-position-embeddings 16 --expert-model-parallel-size 2 "
    "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity --moe-router-load-balancing-type none "
    "--first-k-dense-replace 1 --moe-intermediate-size 32 --n-shared-experts 1",
}
"""Flags as launch scripts mix them."""


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE_SCRIPTS)
def test_whole_scripts_on_two_ranks(case):
    compare(modern(WHOLE_SCRIPTS[case]), world=2)


@pytest.mark.slow
@pytest.mark.parametrize("more, world", [("", 1), ("--context-parallel-size 2", 2)])
def test_what_documents_do_not_see_is_skipped(more, world, tmp_path):
    flags = modern(f"--reset-attention-mask --fix-sub-seq-length 12 {more}")
    compare(flags, world)
    assert skipping_graphs(SMALL + shorter(flags).split(), world, tmp_path)[0] >= 2 * world


@pytest.mark.slow
def test_conversations_packed_into_a_row(tmp_path):
    flags = "--num-layers 1 --sft --data-path conversations --split 8,1,1 --micro-batch-size 1"
    args = [word for word in SMALL if word != "--mock-data"] + MODERN + flags.split()
    args += ["--no-create-attention-mask-in-dataloader", "--calculate-per-token-loss"]
    setup = "tests.megatron.launch.conversations:write"
    eager = runner.run(args, 1, environ={"MINDSPEED_FX_COMPILE": "0"}, setup=setup)
    assert eager.error is None, eager.error
    skipping, compiled = skipping_graphs(args, 1, tmp_path, setup=setup)
    assert skipping >= 2 and compiled.chunks == [1]
    assert 2 <= compiled.graphs[0] <= 4  # training and evaluation; the number of conversations becomes a symbol
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-5) and len(eager.losses) == 2
    for iteration, losses in eager.losses.items():
        assert compiled.losses[iteration] == pytest.approx(losses, rel=1e-5)


def skipping_graphs(args, world, folder, **settings):
    """How many graphs, over all ranks, call attention that computes no score between documents; the run."""
    options = {"codegen": "eager", "dump": str(folder)}
    result = runner.run(args, world, environ={"MINDSPEED_FX_OPTIONS": json.dumps(options)}, **settings)
    assert result.error is None, result.error
    graphs = {path.parent for path in folder.rglob("*.py") if "mindspeed.varlen_attention(" in path.read_text()}
    return len(graphs), result


def test_images_and_texts_in_three_graphs():
    """LLaVA: where a text has an image is data, so that encoder, projection and language model are a graph each."""
    args = [*SMALL, *MODERN, *"--num-layers 1 --img-h 28 --img-w 28 --patch-dim 14".split()]
    eager, compiled = (
        runner.run(args, 1, entry="pretrain_vlm.py", environ=environ)
        for environ in ({"MINDSPEED_FX_COMPILE": "0"}, {"MINDSPEED_FX_OPTIONS": '{"codegen": "eager"}'})
    )
    assert eager.error is None and compiled.error is None, (eager.error, compiled.error)
    assert compiled.chunks == [1] and compiled.graphs == [6]  # training and evaluation
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-5) and len(eager.losses) == 2
    assert [*compiled.losses[2].values()] == pytest.approx([*eager.losses[2].values()], rel=1e-5)


def test_a_file_of_arguments_trains_as_the_words_do():
    args = [*SMALL, *MODERN, *"--num-layers 1 --kv-channels 8 --ffn-hidden-size 64 --lr-warmup-samples 0".split()]
    args += "--no-rope-fusion --no-bias-swiglu-fusion --save-interval 100 --num-query-groups 4 --eval-iters 0".split()
    switch = {"MINDSPEED_FX_OPTIONS": '{"codegen": "eager"}'}
    words = runner.run(args, 1, environ=switch)
    file = runner.run(args, 1, environ=switch, setup="tests.megatron.launch.argument_file:write")
    assert words.error is None and file.error is None, (words.error, file.error)
    assert file.chunks == [1] and file.graphs == [1]
    assert file.losses == words.losses and file.grad_norms == words.grad_norms and len(file.losses) == 2
