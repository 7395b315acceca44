"""Batch-level overlap: one micro-batch is computed while a dispatch or combine of another one is in flight.

DeepSeek-V3 (arXiv 2412.19437, section 3.4) does so in inference. The backward pass has the mirrored order, since
autograd runs backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Pass = Generator[None, None, T]
"""A forward pass as a generator. It pauses while a dispatch or combine is in flight; its value is its output."""


def take_turns(passes: Iterable[Pass[T]], device: torch.device) -> list[T]:
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
