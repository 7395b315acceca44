"""Collects the outputs of the expert layers inside a model, for models that do not return them."""

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

    The context must end before the backward pass, because activation checkpointing calls the layers again there.
    Checkpointing must be non-reentrant: the first pass of reentrant checkpointing has no gradients, so the collected
    losses would have none. Layers of a compiled model are not seen, because ``torch.compile`` ignores hooks registered
    after compilation.
    """
    outputs: list[MoEOutput] = []
    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                hooks.enter_context(layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append(output)))
        yield outputs
