"""Checkpoints that a process of their own writes while training goes on."""

from __future__ import annotations

import pickle
import queue
import shutil

import pytest
import torch

import mindspeed_fx.megatron
from tests.megatron.launch.test_pretrain import COMPILED, EAGER, train


def test_the_process_has_the_adaptor_and_begins_without_cuda():
    mindspeed_fx.megatron.apply()
    try:
        from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

        loop = pickle.loads(pickle.dumps(PersistentAsyncCaller.async_loop))
        assert loop.__module__ == "mindspeed_fx.megatron.checkpoint_worker"
        requests = queue.Queue()
        requests.put("DONE")
        loop(3, requests, queue.Queue(), queue.Queue())
        requests.join()
    finally:
        mindspeed_fx.megatron.undo()


def test_memory_that_training_writes_to_is_copied_first():
    mindspeed_fx.megatron.apply()
    try:
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        shared, own = torch.ones(2).share_memory_(), torch.ones(2)
        buckets = [("file", "key", ([], [("a", shared), ("b", own)]))]
        ((_, _, (_, tensors)),) = FileSystemWriterAsync.preload_tensors(buckets)
        shared.add_(1)
        assert dict(tensors)["a"].tolist() == [1, 1] and dict(tensors)["b"] is own
    finally:
        mindspeed_fx.megatron.undo()


@pytest.mark.slow
@pytest.mark.parametrize("environ", [EAGER, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("worker", ["", "--use-persistent-ckpt-worker"])
def test_a_run_goes_on_from_what_was_saved_beside_it(tmp_path, worker, environ):
    flags = f"""--bf16 --use-distributed-optimizer --ckpt-format torch_dist --async-save {worker} --lr-decay-iters 4
        --train-iters 4 --global-batch-size 4 --save {tmp_path} --save-interval 2"""
    whole = train(flags, 2, environ)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    shutil.rmtree(tmp_path / "iter_0000004")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    rest = train(f"{flags} --load {tmp_path}", 2, environ)
    assert rest.losses == {k: whole.losses[k] for k in (3, 4)}
    assert rest.grad_norms == {k: whole.grad_norms[k] for k in (3, 4)}
