"""How stacks are cut into chunks."""

from dataclasses import replace

import torch

from offload.memory.layout import cut
from tests.fixtures.toy_experts import Toy

TOY = Toy()
CHUNK_BYTES = 2 * 2 * 8 * 16 * 4  # two experts of two fp32 matrices


def test_chunks_are_nearly_equal_and_never_split_an_expert():
    stack = replace(TOY, num_experts=7).stacks[0]
    assert [chunk.num_experts for chunk in cut([stack], CHUNK_BYTES, torch.float32)] == [1, 2, 2, 2]
    assert [chunk.num_experts for chunk in cut([stack], 1, torch.float32)] == [1] * 7
    assert [chunk.first_expert for chunk in cut([stack], 10**6, torch.bfloat16)] == [0]
