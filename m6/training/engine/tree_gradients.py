"""The reducer of ``"deterministic": "any_world"``: the same sums to the bit on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from m6.config.run import RunConfig
from m6.config.sum_tree import TreeShape
from m6.errors import UserError
from m6.training.engine.partitions import is_expert, take_gradient
from m6.training.engine.reducer import GradientReducer
from m6.training.engine.tree_sum import BranchSum, sum_over_ranks
from m6.training.mesh import Mesh, expert_group

if TYPE_CHECKING:
    from m6.training.offloading.experts import OffloadedExperts


class TreeGradients(GradientReducer):
    """Takes the gradients of each pass, and adds them in the order of a fixed tree, in fp32.

    Each part of the parameters has its own tree. For a parameter in two parts, the two sums over all ranks are added.

    Args:
        offloaded: the experts of ``m6.offload``. They belong to each part. ``sums`` writes their sums back to them.
    """

    measures_sums = True

    def __init__(self, config: RunConfig, mesh: Mesh, module: nn.Module, offloaded: OffloadedExperts | None) -> None:
        super().__init__(mesh, module)
        check_device(config, mesh.device)
        self._offloaded = offloaded
        self._same_experts = expert_group("expert_data_parallel", mesh.dims.ep)
        self._nodes = mesh.by_nodes(mesh.dims.ranks("dp"))
        self._nodes_of_experts = mesh.by_nodes(mesh.dims.copies_of_experts())
        self._parts: list[list[nn.Parameter]] = [self.trained]
        self._branches: dict[int, BranchSum] = {}
        if mesh.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it PyTorch refuses cuBLAS calls
            torch.use_deterministic_algorithms(True)

    @property
    def sums_here(self) -> bool:
        """See ``GradientReducer.sums_here``."""
        return True

    def divide(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """See ``GradientReducer.divide``."""
        self._parts = [list(part) for part in parts]

    def end_pass(self, passes: tuple[int, ...], part: int = 0) -> None:
        """See ``GradientReducer.end_pass``."""
        if part not in self._branches:
            dims = self._mesh.dims
            self._branches[part] = BranchSum(TreeShape(passes[:: dims.ep], dims.ep), dims.part(dims.ep)[0])
        leaf = [take_gradient(parameter) for parameter in self._parts[part]]
        if self._offloaded is not None:
            leaf += self._offloaded.runtime.take_gradients()
        self._branches[part].add(leaf)

    def sums(self, loss_scale: float, averaged_over: int) -> dict[nn.Parameter, Tensor]:
        """See ``GradientReducer.sums``; only for ``averaged_over`` 1."""
        assert averaged_over == 1
        branches, self._branches = self._branches, {}
        of_parameters: dict[nn.Parameter, Tensor] = {}
        of_offloaded: list[Tensor] = []
        for part, parameters in enumerate(self._parts):
            sums = self._over_ranks(parameters, branches.pop(part))
            for parameter, total in zip(parameters, sums, strict=False):
                other = of_parameters.get(parameter)
                of_parameters[parameter] = total if other is None else other.add_(total)
            others = sums[len(parameters) :]
            of_offloaded = others if part == 0 else [a + b for a, b in zip(of_offloaded, others, strict=True)]
        if self._offloaded is not None:
            self._offloaded.runtime.put_gradients(of_offloaded)
        return of_parameters

    def _over_ranks(self, parameters: list[nn.Parameter], own: BranchSum) -> list[Tensor]:
        """Returns the sums of a part over all ranks: first of the parameters, then of offloaded experts."""
        found: dict[int, Tensor] = {}
        shape, branches = own.shape, own.finish()
        tensors = range(len(branches[0]))
        for of_experts in (False, True):
            # Without expert parallelism every rank has all experts.
            split = of_experts and self._same_experts is not None
            chosen = [
                index for index in tensors if (index >= len(parameters) or is_expert(parameters[index])) == of_experts
            ]
            group = self._same_experts if split else self._mesh.replicas
            of_chosen = [[branch[index] for index in chosen] for branch in branches]
            order = TreeShape(shape.shares) if split else shape
            nodes = self._nodes_of_experts if split else self._nodes
            sums = sum_over_ranks(of_chosen, order, group, self._mesh.device, nodes)
            found |= dict(zip(chosen, sums, strict=True))
        return [found[index] for index in tensors]


def check_device(config: RunConfig, device: torch.device) -> None:
    """Raises UserError if the model has an operation with a non-deterministic gradient on this device."""
    if device.type == "cuda" and config.model.patch_encoder == "resnet":
        raise UserError(
            'm6.training.deterministic "any_world": the gradient of max pooling, which m6.model.patch_encoder "resnet" '
            'needs, adds up in no fixed order on a GPU; use patch_encoder "linear", or leave one of them out'
        )
