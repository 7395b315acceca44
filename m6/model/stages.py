"""A stage of a pipeline: consecutive layers of the model, under their names in the whole model.

Batch-level overlap: a stage computes one micro-batch while a dispatch or combine of another one is in flight.
DeepSeek-V3 (arXiv 2412.19437, section 3.4) does so in inference. The backward pass has the mirrored order, since
autograd runs backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m6.architecture.names import IGNORED_LABEL
from m6.model.attention import Rotation, prefix_lm_mask
from m6.model.blocks import BlockOutput, M6Block, run_blocks, seed_layer
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.outputs import M6Output
from m6.model.slices import SliceCache
from moe import MoEConfig, MoELayer, RoutingStats, clear_deferred_gradients, defer_gradients

T = TypeVar("T")
Pass = Generator[None, None, T]
"""A forward pass as a generator. It pauses while a dispatch or combine is in flight; its value is its output."""


def interleave(passes: Iterable[Pass[T]], device: torch.device) -> list[T]:
    """Interleaves passes until all have ended: at each pause of a pass the next pass continues.

    The state of the random generators is saved at each pause and restored after it. So a pass gets the same random
    numbers as alone, if it seeds the generators itself at its begin.

    Args:
        device: the device of the generators used by the passes, in addition to the CPU's.

    Returns:
        The values of the passes.
    """
    results: dict[int, T] = {}
    waiting: deque[tuple[int, Pass[T], list[Tensor] | None]] = deque(
        (number, each, None) for number, each in enumerate(passes)
    )
    while waiting:
        number, one, state = waiting.popleft()
        if state is not None:
            _set_random_state(state, device)
        try:
            next(one)
        except StopIteration as end:
            results[number] = end.value
        else:
            waiting.append((number, one, _random_state(device)))
    return [results[number] for number in sorted(results)]


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


Routed = tuple[Tensor, RoutingStats]
"""The balance loss and the statistics of a sparse block."""


class _BlockInputs(NamedTuple):
    """The inputs of all blocks for a micro-batch, without the hidden states."""

    mask: Tensor
    token_mask: Tensor
    rotation: Rotation | None
    dropout_seed: int | None

    def staged_forward(
        self, index: int, block: nn.Module, hidden_states: Tensor, following: Sequence[nn.Module] = ()
    ) -> Generator[None, None, BlockOutput]:
        """Runs a block; see ``M6Block.staged_forward``."""
        seed_layer(self.dropout_seed, index + 1, hidden_states.device)
        assert isinstance(block, M6Block)
        return (
            yield from block.staged_forward(hidden_states, self.mask, self.token_mask, index, self.rotation, following)
        )


def keep_layers(model: M6ForConditionalGeneration, layers: set[int]) -> None:
    """Removes all modules of other layers from a model; the names of the rest stay.

    The embeddings belong to the first layer, the final norm to the last one. Call it on the meta device.
    """
    inner = model.model
    for index in range(len(inner.layers)):
        if index not in layers:
            inner.layers[index] = nn.Identity()
    if 0 not in layers:
        inner.embeddings = nn.Identity()
    if len(inner.layers) - 1 not in layers:
        inner.norm = nn.Identity()


class ModelStage(nn.Module):
    """Consecutive layers of the model. The last stage also computes the losses.

    Attributes:
        layout: of the hidden states between stages.

    Args:
        model: this process's part of the model, see ``keep_layers``.
        layers: numbers of the layers of this stage.
        table: the token embedding, the output matrix of the last stage. It belongs to the first stage; on another rank
            than the first stage's this is a copy.
    """

    def __init__(self, model: M6ForConditionalGeneration, layers: range, table: nn.Parameter | None) -> None:
        super().__init__()
        inner, config = model.model, model.config
        self.config, self.numbers = config, layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        self.embeddings = inner.embeddings if self.is_first else None
        self.layers = nn.ModuleList(inner.layers[index] for index in layers)
        self.norm = inner.norm if self.is_last else None
        self.table = table if self.is_last else None
        self._rotate, self._head, self.layout = inner.rotation, model.head, inner.layout
        self._moe = None if config.moe is None else config.moe_config()
        self._sparse = [index for index in range(config.num_layers) if config.is_moe_layer(index)]

    @classmethod
    def whole(cls, model: M6ForConditionalGeneration) -> ModelStage:
        """All layers of a model as one stage."""
        inner = model.model
        return cls(model, range(len(inner.layers)), inner.embeddings.tokens.weight)

    def forward(
        self,
        hidden_states: Tensor | None,
        inputs: dict[str, Tensor],
        labels: Tensor,
        dropout_seed: int | None,
        past: SliceCache | None = None,
    ) -> tuple[Tensor, M6Output]:
        """Runs the layers on whole rows, or on slices of T tokens, see ``m6.training.engine.sliced_pipeline``.

        Args:
            hidden_states: [B, S, D], or [B, T, D]; None in the first stage.
            inputs: ``MicroBatch.model_inputs``; for a slice, with the ``sample_ids`` of all tokens up to its end.
            labels: int64 [B, S]; for a slice, with one more label behind its end.
            dropout_seed: see ``M6Model.forward``.
            past: keys and values of earlier slices.

        Returns:
            the hidden states after the layers, and the stage's part of loss and statistics: ``aux_loss`` of its own
            layers, ``router_stats`` of all layers of the model, with zeros for other stages, and in the last stage
            ``target_losses``.
        """
        hidden_states, given = self._enter(hidden_states, inputs, dropout_seed)
        blocks = zip(self.numbers, self.layers, strict=True)
        outputs = run_blocks(blocks, hidden_states, given.mask, given.token_mask, given.rotation, past, dropout_seed)
        routed: list[Routed | None] = []
        for output in outputs:
            hidden_states = output.hidden_states
            routed.append(_routed(output))
        return self._leave(hidden_states, routed, labels, given.token_mask.shape)

    def forward_interleaved(
        self,
        batches: Sequence[tuple[dict[str, Tensor], Tensor]],
        dropout_seeds: Sequence[int | None],
        device: torch.device,
    ) -> list[M6Output]:
        """Runs all layers of a model on interleaved micro-batches, see ``interleave``.

        With activation checkpointing the micro-batches interleave inside of each block, and the backward pass runs the
        block again for all of them. So the last combine of a block ends before the next block begins.

        Args:
            batches: inputs and labels of each micro-batch, see ``forward``.
            dropout_seeds: of each micro-batch.
            device: of the model.
        """
        clear_deferred_gradients(self)
        if not any(isinstance(block, M6Block) and block.gradient_checkpointing for block in self.layers):
            passes = (self._staged_forward(*batch, seed) for batch, seed in zip(batches, dropout_seeds, strict=True))
            return interleave(passes, device)
        entered = [self._enter(None, inputs, seed) for (inputs, _), seed in zip(batches, dropout_seeds, strict=True)]
        states, routed = [hidden_states for hidden_states, _ in entered], [list[Routed | None]() for _ in batches]

        def run(index: int, block: nn.Module, *states: Tensor) -> list[BlockOutput]:
            each = zip(states, entered, strict=True)
            return interleave((given.staged_forward(index, block, hidden) for hidden, (_, given) in each), device)

        for index, block in zip(self.numbers, self.layers, strict=True):
            # An early stop would leave exchanges of tokens of the other micro-batches unfinished.
            outputs: list[BlockOutput] = checkpoint(run, index, block, *states, use_reentrant=False, early_stop=False)
            states = [output.hidden_states for output in outputs]
            for own, output in zip(routed, outputs, strict=True):
                own.append(_routed(output))
        ends = zip(states, routed, batches, entered, strict=True)
        return [
            self._leave(hidden_states, own, labels, given.token_mask.shape)[1]
            for hidden_states, own, (_, labels), (_, given) in ends
        ]

    def _up_to_a_pause(self, begin: int) -> list[nn.Module]:
        """The blocks from this place on, up to and with the first sparse one."""
        blocks = list(self.layers)[begin:]
        sparse = (isinstance(block, M6Block) and isinstance(block.ffn, MoELayer) for block in blocks)
        return blocks[: next((place for place, pauses in enumerate(sparse, 1) if pauses), len(blocks))]

    def _staged_forward(
        self, inputs: dict[str, Tensor], labels: Tensor, dropout_seed: int | None
    ) -> Generator[None, None, M6Output]:
        """Runs all layers, and pauses while a dispatch or combine is in flight."""
        hidden_states, given = self._enter(None, inputs, dropout_seed)
        routed: list[Routed | None] = []
        for block in self._up_to_a_pause(0):
            defer_gradients(block)
        for place, (index, block) in enumerate(zip(self.numbers, self.layers, strict=True)):
            output = yield from given.staged_forward(index, block, hidden_states, self._up_to_a_pause(place + 1))
            hidden_states = output.hidden_states
            routed.append(_routed(output))
        return self._leave(hidden_states, routed, labels, given.token_mask.shape)[1]

    def _enter(
        self, hidden_states: Tensor | None, inputs: dict[str, Tensor], dropout_seed: int | None
    ) -> tuple[Tensor, _BlockInputs]:
        """The hidden states before the first block, and the other inputs of all blocks."""
        types, samples = inputs["token_type_ids"], inputs["sample_ids"]
        if self.embeddings is not None:
            seed_layer(dropout_seed, 0, types.device)
            hidden_states = self.layout.divided(
                self.embeddings(inputs["input_ids"], types, inputs["position_ids"], inputs["pixel_values"])
            )
        assert hidden_states is not None
        begin, end = samples.shape[1] - types.shape[1], samples.shape[1]
        rotation = self._rotate(torch.arange(begin, end, device=samples.device))
        mask = prefix_lm_mask(types, samples, begin)
        return hidden_states, _BlockInputs(mask, samples[:, begin:], rotation, dropout_seed)

    def _leave(
        self, hidden_states: Tensor, routed: Sequence[Routed | None], labels: Tensor, shape: torch.Size
    ) -> tuple[Tensor, M6Output]:
        """The result of ``forward``, from the hidden states of [B, S] tokens and the routing after the blocks."""
        aux_loss = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        stats: dict[int, RoutingStats] = {}
        for index, of_block in zip(self.numbers, routed, strict=True):
            if of_block is not None:
                aux_loss = aux_loss + of_block[0]
                stats[index] = of_block[1]
        all_stats: Any = ()
        if self._moe is not None:
            absent = no_statistics(self._moe, aux_loss.device)
            all_stats = tuple(stats.get(index, absent) for index in self._sparse)
        target_losses = None
        if self.norm is not None and self.table is not None:
            hidden_states = self.norm(self.layout.whole(hidden_states, *shape))
            targets = labels[:, 1:]
            labelled = (targets != IGNORED_LABEL).nonzero(as_tuple=True)
            states = hidden_states[:, : targets.shape[1]][labelled]
            target_losses = self._head.losses(states, self.table, targets[labelled], self.config)
        return hidden_states, M6Output(target_losses=target_losses, aux_loss=aux_loss, router_stats=all_stats)


def _routed(output: BlockOutput) -> Routed | None:
    return None if output.aux_loss is None else (output.aux_loss, output.router_stats[0])


def no_statistics(config: MoEConfig, device: torch.device) -> RoutingStats:
    """The statistics of a layer without a routed token."""
    experts, prototypes = (
        torch.zeros(config.num_experts, device=device),
        torch.zeros(config.num_prototypes, device=device),
    )
    none = torch.zeros((), device=device)
    return RoutingStats(experts, prototypes, none, prototypes, experts, without_expert=none, gate_sum=none)
