"""The copy queue on a real GPU. Skipped, in words, where there is none: nothing here was ever run on the machines of CI."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import deadpool_ext

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine: the CUDA copy queue is not run here")


def test_device_tensors_arrive_whole_and_after_the_work_before_them() -> None:
    """The copies follow what the training stream holds at the call; the flag is set after the last byte."""
    device = torch.device("cuda", 0)
    tensors = [torch.zeros(1 << 20, device=device) for _ in range(8)]
    host = torch.empty(sum(t.numel() for t in tensors), dtype=torch.float32).pin_memory()
    flag = np.zeros(1, dtype=np.uint64)
    for i, tensor in enumerate(tensors):
        for _ in range(50):
            tensor.add_(i + 1)  # still running when the copies are queued
    sizes = np.array([t.numel() * 4 for t in tensors], dtype=np.uint64)
    targets = host.data_ptr() + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.uint64)
    sources = np.array([t.data_ptr() for t in tensors], dtype=np.uint64)
    queue = deadpool_ext.CopyQueue(0)
    stream = torch.cuda.current_stream(device).cuda_stream
    queue.submit(sources, targets.astype(np.uint64), sizes, flag.ctypes.data, 7, stream=stream)
    deadline = time.monotonic() + 30
    while flag[0] != 7 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert flag[0] == 7
    for i, part in enumerate(host.split(1 << 20)):
        assert torch.equal(part, torch.full_like(part, 50.0 * (i + 1)))
    queue.close()


def test_progress_grows_in_steps_and_what_it_says_is_there() -> None:
    """The agent sends on behind the copy: every byte below the word must be final."""
    device = torch.device("cuda", 0)
    payload_bytes = 300 << 20
    source = torch.full((payload_bytes,), 7, dtype=torch.uint8, device=device)
    host = torch.zeros(payload_bytes, dtype=torch.uint8).pin_memory()
    words = np.zeros(2, dtype=np.uint64)
    one = [np.array([x], dtype=np.uint64) for x in (source.data_ptr(), host.data_ptr(), payload_bytes)]
    queue = deadpool_ext.CopyQueue(0)
    stream = torch.cuda.current_stream(device).cuda_stream
    queue.submit(*one, words.ctypes.data, 1, stream=stream, progress_address=words.ctypes.data + 8)
    seen, steps, deadline = 0, 0, time.monotonic() + 30
    while seen < payload_bytes and time.monotonic() < deadline:
        now = deadpool_ext.load_u64(words.ctypes.data + 8)
        if now > seen:
            assert bool((host[seen:now] == 7).all())
            seen, steps = now, steps + 1
    assert seen == payload_bytes and steps >= 1
    assert queue.wait(1, 30)
    queue.close()
