"""The turns of passes: their order, their values, and their random numbers."""

from collections.abc import Iterator

import pytest
import torch

from m6.model.stages import Pass, interleave


def drawing(name: str, pauses: int, events: list[str]) -> Pass[list[float]]:
    """A pass that seeds the generator and draws a number before and after each pause."""
    torch.manual_seed(hash(name) % 1000)
    drawn = []
    for number in range(pauses):
        events.append(f"{name}{number}")
        drawn.append(torch.rand(()).item())
        yield
    drawn.append(torch.rand(()).item())
    return drawn


def test_passes_of_other_lengths_draw_what_they_draw_alone() -> None:
    lengths, events = {"a": 2, "b": 0, "c": 3}, []
    alone = [interleave([drawing(*each, [])], torch.device("cpu"))[0] for each in lengths.items()]
    together = interleave((drawing(*each, events) for each in lengths.items()), torch.device("cpu"))
    assert together == alone
    assert events == ["a0", "c0", "a1", "c1", "c2"]
    assert len({number for each in together for number in each}) == 3 + 1 + 4


def test_an_error_of_one_pass_ends_all() -> None:
    def failing() -> Iterator[None]:
        yield
        raise ValueError("no rows")

    with pytest.raises(ValueError, match="no rows"):
        interleave([drawing("a", 5, []), failing()], torch.device("cpu"))
