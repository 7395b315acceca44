"""Tensors that are exchanged together."""

import pytest
import torch

from m6.training.reduction.collectives import buckets


def test_buckets_hold_all_tensors_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.training.reduction.collectives.BUCKET_ELEMENTS", 10)
    tensors = [torch.zeros(size) for size in (4, 6, 1, 30, 2, 9)]
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors)] == [[4, 6], [1], [30], [2], [9]]
