"""Counting storages."""

import weakref

import torch

from m6.training.sizes import SavedTensors


def test_measuring_keeps_no_graph():
    """exp saves its own output: a hook that keeps that very tensor would keep the graph for good."""
    weight = torch.ones(8, requires_grad=True)
    with SavedTensors(torch.nn.Identity()) as saved:
        output = weight.exp()
    assert saved.bytes == output.untyped_storage().nbytes()
    output.sum().backward()
    assert torch.equal(weight.grad, output)
    with SavedTensors(torch.nn.Identity()):
        kept = weakref.ref((weight + 0).exp().untyped_storage())
    assert kept() is None
