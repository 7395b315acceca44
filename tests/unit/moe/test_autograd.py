"""A function whose gradient another function computes."""

import torch
from torch import Tensor

from moe.autograd import custom_gradient, same


def test_a_map_and_its_transpose_are_what_autograd_finds():
    matrix, values = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64, requires_grad=True)
    found = custom_gradient(values, lambda values: matrix @ values, lambda gradient: matrix.t() @ gradient)
    weights = torch.randn(3, dtype=torch.float64)
    (expected,) = torch.autograd.grad((matrix @ values * weights).sum(), values)
    assert torch.equal(found, matrix @ values)
    assert torch.equal(*torch.autograd.grad((found * weights).sum(), values), expected)


def test_the_gradient_is_that_of_the_second_function_alone():
    def threefold(gradient: Tensor) -> Tensor:
        return 3 * gradient

    values = torch.ones(2, requires_grad=True)
    found = custom_gradient(values, same, threefold)
    assert found is not values
    assert found.data_ptr() == values.data_ptr()
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3, 3]
