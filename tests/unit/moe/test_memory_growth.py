"""Nothing that a layer allocates grows with the square of the number of experts or of tokens."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe import MoEConfig, MoELayer
from moe.kernels.experts_op import experts_backward_op, experts_op


class Allocations(TorchDispatchMode):
    """Counts the elements that all operators return, those inside of ours included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for own in (experts_op, experts_backward_op):
            if func is own._opoverload:
                with self:
                    return own._init_fn(*args)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements += tensor.numel()
        return result


def elements(dtype: torch.dtype, num_tokens: int, config: MoEConfig) -> int:
    """In forward and backward."""
    layer = MoELayer(8, 8, config).to(dtype)
    x = torch.randn(num_tokens, 8, dtype=dtype, requires_grad=True)
    with Allocations() as allocations:
        output = layer(x)
        (output.hidden_states.sum() + output.aux_loss).backward()
    return allocations.elements


@pytest.mark.parametrize("prototypes", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the latter by the loop over experts
@pytest.mark.parametrize("changes", [{}, {"capacity_factor": 1.0}], ids=str)
def test_nothing_is_quadratic(changes: dict, dtype: torch.dtype, prototypes: int) -> None:
    """D = 8, F = 8: weights are at most 128 E, inner values 8 K T, scores T E.

    The bounds are some 1.2 times what the greediest of these layers allocates. One-hot dispatch would be T E C = K T^2,
    and a gradient of the whole stack for every w[e] at least 64 E^2: each 60 times its bound or more.
    """
    for num_tokens, num_experts, factor in [(64, 4096, 20), (65536, 8, 45)]:
        config = MoEConfig(num_experts=num_experts, num_prototypes=prototypes, **changes)
        bound = factor * (128 * num_experts + 8 * num_tokens * prototypes + num_tokens * num_experts)
        assert max(prototypes * num_tokens**2, 64 * num_experts**2) > 60 * bound
        assert elements(dtype, num_tokens, config) < bound
