"""Dropout of the tensor-parallel region draws from Megatron's tracker, the same numbers in eager mode and in a
graph.
"""

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from tests.megatron.gpt_models import batch, tiny_gpt, train


def seeded(call, seed=11, **ranks):
    model_parallel_cuda_manual_seed(seed, **{"tp_rank": 0, "ep_rank": 0, "etp_rank": 0} | ranks)
    return call()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_three_steps_with_dropout_equal_eager(backend):
    """Steps, because each must go on where the last one left the tracker's state and the default generator."""
    model, inputs = tiny_gpt(dropout=0.2), batch()
    expected = seeded(lambda: [train(model, inputs) for _ in range(3)])
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    actual = seeded(lambda: [train(model, inputs, compiled) for _ in range(3)])
    assert len({loss.item() for loss, _ in expected}) == 3
    for (loss, grads), (expected_loss, expected_grads) in zip(actual, expected):
        torch.testing.assert_close(loss, expected_loss)
        for name in grads:
            torch.testing.assert_close(grads[name], expected_grads[name], rtol=1e-4, atol=1e-6)


def test_no_recompilation_from_step_to_step():
    model, inputs = tiny_gpt(dropout=0.2), batch()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    seeded(lambda: [train(model, inputs, compiled) for _ in range(3)])
    assert counter.frame_count == 1


def test_evaluation_draws_nothing():
    model, inputs = tiny_gpt(dropout=0.2).eval(), batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = seeded(lambda: (torch.get_rng_state(), get_cuda_rng_tracker().get_states()))
    torch.testing.assert_close(compiled(**inputs), model(**inputs))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(state, before[1][name]) for name, state in get_cuda_rng_tracker().get_states().items())


def dropped(name="model-parallel-rng", backend=None):
    def f(x):
        with get_cuda_rng_tracker().fork(name):
            inside = torch.nn.functional.dropout(x, 0.5)
            with get_cuda_rng_tracker().fork("expert-parallel-rng"):
                nested = torch.nn.functional.dropout(x, 0.25)
            again = torch.nn.functional.dropout(x, 0.5)
        return inside, nested, again, torch.nn.functional.dropout(x, 0.5)

    return (torch.compile(f, backend=backend, fullgraph=True) if backend else f)(torch.ones(4, 33))


def test_nested_forks():
    expected, actual = seeded(dropped), seeded(lambda: dropped(backend="eager"))
    for a, b in zip(actual, expected):
        assert torch.equal(a, b)
    assert not torch.equal(expected[0], expected[2])


def test_ranks_differ_inside_the_region_only():
    first, second = seeded(dropped), seeded(dropped, tp_rank=1)
    assert (
        not torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]) and torch.equal(first[3], second[3])
    )


def test_fork_leaves_the_default_stream_where_it_was():
    def drawn():
        with get_cuda_rng_tracker().fork():
            torch.rand(3)
        return torch.rand(3)

    assert torch.equal(seeded(drawn), seeded(lambda: torch.rand(3)))


def test_states_can_be_saved_and_set():
    tracker = get_cuda_rng_tracker()
    seeded(dropped)
    saved, default = tracker.get_states(), torch.get_rng_state()
    expected = dropped()
    tracker.set_states(saved)
    torch.set_rng_state(default)
    for a, b in zip(dropped(), expected):
        assert torch.equal(a, b)


def test_seeds_and_names_are_used_once():
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("a", 1)
    with pytest.raises(Exception, match="seed 1 already exists"):
        tracker.add("b", 1)
    with pytest.raises(Exception, match="cuda rng state a already exists"):
        tracker.add("a", 2)


def test_noise_of_routers_in_a_fork_is_that_of_eager_mode():
    def draw(x):
        with get_cuda_rng_tracker().fork():
            return (
                x.detach().clone().exponential_(),
                torch.nn.functional.dropout(x, 0.5),
                (x * 2).detach().clone().uniform_(),
            )

    results = []
    for call in (draw, torch.compile(draw, backend="aot_eager", fullgraph=True)):
        results.append(seeded(lambda: [*call(torch.ones(3, 4)), *call(torch.ones(3, 4)), torch.rand(2)]))  # noqa: B023
    for eager, compiled in zip(*results):
        assert torch.equal(eager, compiled)
