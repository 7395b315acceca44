"""Rotary positions; that packing, padding and caches do not change them is in the other files: their models rotate."""

import pytest
import torch

from m6.errors import UserError
from m6.model.attention import rotate, rotation_of


def test_pairs_are_turned_as_complex_numbers():
    torch.manual_seed(0)
    heads, index, base = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 7, 300]), 50.0
    frequencies = torch.tensor([base ** (-2 * pair / 8) for pair in range(4)], dtype=torch.float64)
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * torch.exp(1j * index[:, None] * frequencies)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotate(heads, rotation_of(index, 8, base)), expected, rtol=0, atol=1e-12)


def test_scores_depend_on_distances_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 2, 6, 4, dtype=torch.float64)
    scores = []
    for begin in (0, 1000):
        rotation = rotation_of(torch.arange(begin, begin + 6), 4, 10_000.0)
        scores.append(rotate(query, rotation) @ rotate(key, rotation).mT)
    torch.testing.assert_close(*scores, rtol=0, atol=1e-12)
    assert not torch.allclose(scores[0], query @ key.mT)


def test_without_a_base_nothing_turns(tiny_model, pack, samples):
    losses = {}
    for base in (0.0, 100.0):
        model = tiny_model(rotary_base=base)
        with torch.no_grad():
            losses[base] = float(model(**pack(model.config, [samples])).loss)
        model.model.rotation = lambda index: None
        with torch.no_grad():
            assert (float(model(**pack(model.config, [samples])).loss) == losses[base]) == (base == 0)
    assert losses[0.0] != losses[100.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_base": 1.0}, "rotary_base must be 0 or a number above 1, found 1.0"),
        ({"rotary_base": "10000"}, "rotary_base must be 0 or a number above 1, found '10000'"),
        ({"hidden_size": 12, "num_attention_heads": 4}, "rotary_base needs heads of an even size"),
    ],
)
def test_mistakes_are_named(tiny_config, changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)
