"""Slices of rows: legal cuts against the definition, and passes of slices against those of whole rows."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m6.architecture.names import IGNORED_LABEL, IMAGE, SOURCE, TARGET
from m6.data.collate import MicroBatch
from m6.model import M6ForConditionalGeneration
from m6.model.attention import prefix_lm_mask
from m6.model.outputs import M6Output
from m6.model.slices import SliceKeys, nearest_valid_cuts, valid_cuts
from m6.model.stages import ModelStage
from m6.training.engine.sliced_pipeline import slices_of
from tests.fixtures.packed_rows import MOE

# Of a sample: tokens of its picture, its source and its target.
SAMPLE = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 5))
ROWS = st.lists(st.lists(SAMPLE, max_size=4), min_size=1, max_size=3)


def row_of(samples: list[tuple[int, int, int]], length: int) -> tuple[list[int], list[int]]:
    """Types and sample numbers of a packed row, filled up with padding."""
    types, numbers = [], []
    for number, sizes in enumerate(samples, start=1):
        for kind, size in zip((IMAGE, SOURCE, TARGET), sizes, strict=True):
            types += [kind] * size
            numbers += [number] * size
    padding = [0] * (length - len(types))
    return types + padding, numbers + padding


@given(ROWS, st.integers(1, 5))
def test_legal_cuts_are_those_of_the_mask(rows: list[list[tuple[int, int, int]]], padding: int):
    length = max(sum(map(sum, row)) for row in rows) + padding
    types, samples = (torch.tensor(each) for each in zip(*(row_of(row, length) for row in rows), strict=True))
    mask = prefix_lm_mask(types, samples)
    expected = [place for place in range(1, length) if not mask[:, :, :place, place:].any()]
    assert valid_cuts(types, samples) == expected


def test_packed_rows_are_cut_between_samples_and_inside_of_targets():
    types, samples = (torch.tensor([each]) for each in row_of([(2, 2, 8), (0, 4, 8)], 24))
    assert valid_cuts(types, samples) == [*range(4, 13), *range(16, 24)]


@given(st.sets(st.integers(1, 29)), st.integers(2, 6))
def test_cuts_are_the_nearest_legal_ones(legal: set[int], slices: int):
    cuts = nearest_valid_cuts(sorted(legal), 30, slices)
    assert cuts == sorted(set(cuts))
    assert set(cuts) <= legal
    for number in range(1, slices):
        equal = number * 30 / slices
        if legal:
            assert min(abs(cut - equal) for cut in cuts) == min(abs(place - equal) for place in legal)


def batch_of(rows: list[list[tuple[int, int, int]]], length: int, image_token_id: int) -> MicroBatch:
    """Packed rows of random tokens; all targets but their first tokens have labels."""
    types, samples = (torch.tensor(each) for each in zip(*(row_of(row, length) for row in rows), strict=True))
    ids = torch.randint(10, 40, types.shape)
    ids[(types == IMAGE) & (samples > 0)] = image_token_id
    labelled = (types == TARGET) & (samples > 0)
    labelled[:, 1:] &= (types[:, 1:] == types[:, :-1]) & (samples[:, 1:] == samples[:, :-1])
    labelled[:, 0] = False
    pictures = sum(size > 0 for row in rows for size, _, _ in row)
    return MicroBatch(
        input_ids=ids, token_type_ids=types, position_ids=torch.arange(length).expand_as(ids) % 4, sample_ids=samples,
        labels=torch.where(labelled, ids, IGNORED_LABEL),
        objective_ids=torch.zeros_like(ids), data_source_ids=torch.zeros_like(ids),
        pixel_values=torch.randn(pictures, 3, 16, 16, dtype=torch.float64),
        num_target_tokens=0, num_tokens=0, num_samples=0, num_token_pairs=0,
    )  # fmt: skip


def loss_of(batch: MicroBatch, output: M6Output) -> torch.Tensor:
    return output.target_losses.sum() + output.aux_loss


def whole_pass(model: M6ForConditionalGeneration, batch: MicroBatch) -> list[torch.Tensor]:
    """The loss and all gradients."""
    model = copy.deepcopy(model)
    loss = loss_of(batch, model(**batch.model_inputs(), labels=batch.labels, return_logits=False))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def sliced_pass(model: M6ForConditionalGeneration, batch: MicroBatch, cuts: list[int]) -> list[torch.Tensor]:
    """The same. Slices go forward through two stages from the first to the last, and backward from the last one."""
    model = copy.deepcopy(model)
    layers = range(1), range(1, model.config.num_layers)
    stages = [ModelStage(model, each, model.model.embeddings.tokens.weight).train() for each in layers]
    keys = [SliceKeys(batch.sample_ids) for _ in stages]
    losses = []
    for each in slices_of(batch, 0, 0, cuts, model.config):
        hidden, aux_loss = None, 0.0
        for stage, own in zip(stages, keys, strict=True):
            past = own.of_slice(each.begin, each.batch.sample_ids.shape[1])
            hidden, output = stage(hidden, each.batch.model_inputs(), each.batch.labels, None, past)
            aux_loss = aux_loss + output.aux_loss
        output.aux_loss = aux_loss
        losses.append(loss_of(each.batch, output))
    for loss in reversed(losses):
        loss.backward()
    left = [part._values.numel() for own in keys for part in own._parts.values()]
    assert len(left) == 2 * model.config.num_layers
    assert not any(left), "keys are kept after the last backward pass"
    return [torch.stack(losses).sum().detach(), *(parameter.grad for parameter in model.parameters())]


def largest_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative to the largest element of each tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


PREFIXES = [[(4, 3, 6), (0, 4, 8)], [(0, 2, 8), (4, 0, 9)]]
CAUSAL = [[(0, 0, 25)]]
CAPACITY = {"capacity_factor": 0.6, "min_capacity": 1}
CASES: dict[str, tuple[Any, list[int], dict[str, Any]]] = {
    "prefixes and pictures": (PREFIXES, [10, 17, 23], {}),
    "uneven": (CAUSAL, [10, 17], {}),
    "slices of one token": (CAUSAL, list(range(1, 26)), {}),
    "a row of padding": ([*PREFIXES, []], [10, 17], {}),
    "dense, without rotary positions": (CAUSAL, [5, 13], {"rotary_base": 0.0, "moe": None}),
    # The loss that balances the experts depends on the choices of later slices.
    "auxiliary losses": (
        [*PREFIXES, []],
        [10, 17, 23],
        {"moe": {**MOE, "aux_loss_weight": 1.0, "z_loss_weight": 0.1}},
    ),
    # An expert is full for later slices by the choices of earlier ones.
    "a capacity": ([*PREFIXES, []], [10, 17, 23], {"moe": {**MOE, **CAPACITY, "top_k": 2, "drop_order": "causal"}}),
    "a capacity by position": (CAUSAL, [5, 13], {"moe": {**MOE, **CAPACITY}}),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_slices_have_the_loss_and_the_gradients_of_whole_rows(tiny_model: Any, case: str, checkpointing: bool):
    rows, cuts, changes = CASES[case]
    model = tiny_model(num_layers=3, **changes).train()
    batch = batch_of(rows, 26, model.config.image_token_id)
    assert set(cuts) <= set(valid_cuts(batch.token_type_ids, batch.sample_ids))
    expected = whole_pass(model, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for block in model.model.layers:
            block._can_checkpoint_with_cache = True
    # float64: sums in another order. Auxiliary losses are fp32.
    assert largest_error(sliced_pass(model, batch, cuts), expected) < (1e-7 if "losses" in case else 1e-12)


def test_a_cut_inside_of_a_source_changes_the_gradients(tiny_model: Any):
    """So that the test above would see a wrong mask."""
    model = tiny_model(num_layers=3).train()
    batch = batch_of([[(0, 8, 12)]], 20, model.config.image_token_id)
    assert largest_error(sliced_pass(model, batch, [4]), whole_pass(model, batch)) > 1e-3


def test_slices_must_go_backward_from_the_last_one():
    keys = SliceKeys(torch.ones(1, 6, dtype=torch.int64))
    new = torch.randn(2, 1, 1, 3, 4, requires_grad=True)
    ends = [
        keys.of_slice(begin, begin + 3).update(part, part, 0)[0].sum() for begin, part in zip((0, 3), new, strict=True)
    ]
    with pytest.raises(AssertionError, match="came before that of the next one"):
        ends[0].backward()


def test_slices_draw_different_numbers(tiny_model: Any):
    batch = batch_of(CAUSAL, 26, tiny_model().config.image_token_id)
    seeds = [each.seed for each in slices_of(batch, 0, 7, [5, 13], tiny_model().config)]
    assert seeds[0] == 7
    assert len({seed % 2**32 for seed in seeds}) == 3
