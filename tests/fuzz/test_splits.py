"""Equal rows in any split into micro-batches, with any losses of routers: equal losses and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m6.model import M6ForConditionalGeneration
from tests.fixtures.packed_rows import Sample
from tests.fuzz.examples import long_and_short, search

tokens = st.integers(0, 30)
samples = st.builds(
    Sample,
    picture=st.booleans(),
    source=st.lists(tokens, max_size=4),
    target=st.lists(tokens, max_size=5),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
)
weights = st.sampled_from([0.0, 0.01, 0.3])
routers = st.fixed_dictionaries(
    {
        "num_experts": st.just(8),
        "num_prototypes": st.sampled_from([1, 2, 4]),
        "top_k": st.integers(1, 2),
        "gating": st.sampled_from(["softmax", "sigmoid"]),
        "num_shared_experts": st.integers(0, 1),
        "aux_loss_weight": weights,
        "z_loss_weight": weights,
        "balance_scope": st.just("sequence"),
    }
)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[list[Sample]], list[list[int]]]:
    """Rows of one to three samples, and the numbers of the rows of each micro-batch."""
    rows = draw(st.lists(st.lists(samples, min_size=1, max_size=3), min_size=1, max_size=6))
    places = draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    order = draw(st.permutations(range(len(rows))))
    return rows, [part for m in range(4) if (part := [row for row in order if places[row] == m])]


@long_and_short(30, 200)
def test_any_split_of_any_rows(
    number: int,
    tiny_model: Callable[..., M6ForConditionalGeneration],
    pack: Callable[..., dict[str, Tensor]],
):
    """1e-10 in float64 is about 1e5 rounding errors."""

    @given(routers, splits(), st.integers(0, 3))
    def check(moe: dict[str, Any], case: tuple[list[list[Sample]], list[list[int]]], left: int) -> None:
        rows, parts = case
        model = tiny_model(moe=moe, moe_layer_frequency=1).train()
        parameters = list(model.parameters())
        whole = pack(model.config, rows)
        items = whole["loss_weights"].sum().double()
        expected = model(**whole).loss
        loss = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(parts):
            batch = pack(model.config, [rows[row] for row in part], left=(left + number) % 4)
            loss = loss + model(**batch, num_items_in_batch=items, return_logits=False).loss
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(
            torch.autograd.grad(loss, parameters, allow_unused=True),
            torch.autograd.grad(expected, parameters, allow_unused=True),
            atol=1e-10,
            rtol=0,
        )

    search(number, check)
