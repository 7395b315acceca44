"""Collects what the expert layers inside of a model return, if the model itself does not pass it on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from moe.layer import MoELayer, MoEOutput


@contextmanager
def collect_outputs(model: nn.Module) -> Iterator[list[MoEOutput]]:
    """Collects the outputs of every ``MoELayer`` in a model, in the order of the calls::

        with collect_outputs(model) as outputs:
            loss = task_loss(model(batch))
        loss = loss + sum(output.aux_loss for output in outputs)

    The context ends before the backward pass, in which activation checkpointing calls the layers again. Checkpointing
    has to be non-reentrant, since the first pass of the reentrant one has no gradients, and so its losses have none.
    Layers inside of a compiled model are not seen, because ``torch.compile`` ignores hooks that come later.
    """
    outputs: list[MoEOutput] = []
    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                hooks.enter_context(layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append(output)))
        yield outputs
