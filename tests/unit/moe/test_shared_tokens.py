"""The pairs of a range of tokens: against a search through all pairs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.expert_parallel import pairs_of_tokens
from moe.routing import Routing


@given(data=st.data(), num_tokens=st.integers(0, 12), num_experts=st.integers(1, 5))
def test_pairs_of_a_range_of_tokens(data: st.DataObject, num_tokens: int, num_experts: int):
    """Also of an empty range, and of tokens and experts without a pair."""
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, num_tokens)] * 2)))
    every = [(expert, token) for expert in range(num_experts) for token in range(num_tokens)]
    pairs = [pair for pair in every if data.draw(st.booleans())]
    tokens = torch.tensor([token for _, token in pairs], dtype=torch.int64)
    counts = torch.tensor([sum(each == expert for each, _ in pairs) for expert in range(num_experts)])
    found = pairs_of_tokens(Routing(tokens, torch.arange(float(len(pairs))), counts), begin, end)
    inside = [(place, *pair) for place, pair in enumerate(pairs) if begin <= pair[1] < end]
    assert found.tokens.tolist() == [token - begin for _, _, token in inside]
    assert found.gates.tolist() == [place for place, _, _ in inside]
    assert found.counts.tolist() == [sum(each == expert for _, each, _ in inside) for expert in range(num_experts)]
