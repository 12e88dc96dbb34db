"""Four gloo processes: dropless experts over expert parallel 2 and tensor parallel 2, in parts of different length."""

import pytest
import torch

from tests import ranks


def worker(rank, store):
    torch.set_num_threads(1)
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import mindspeed_fx.megatron_adaptor  # noqa: F401
    from tests.megatron.gpt_models import batch, tiny_gpt, train

    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(5)
    found, state = {}, None
    for dispatcher in ("allgather", "alltoall"):  # the first moves parts of one length alone
        torch.manual_seed(0)
        model = tiny_gpt(
            experts=4,
            layers=1,
            tp=2,
            sequence_parallel=True,
            expert_model_parallel_size=2,
            moe_token_dispatcher_type=dispatcher,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
        )
        if state is not None:
            model.load_state_dict(state)
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in model.state_dict().items()}
        found[dispatcher] = train(model, batch())
        if dispatcher == "alltoall":
            torch._dynamo.reset()
            found["compiled"] = train(
                model, batch(), torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
            )
    expected, gradients = found["allgather"]
    for name in ("alltoall", "compiled"):
        torch.testing.assert_close(found[name][0], expected)
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[name][1][key], gradient, rtol=1e-4, atol=1e-6)
    assert any(g.abs().max() > 0 for k, g in gradients.items() if "experts" in k)
    dist.destroy_process_group()


@pytest.mark.slow
def test_experts_over_expert_and_tensor_parallel_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks.spawn(worker, args=(str(tmp_path / "store"),), nprocs=4)
