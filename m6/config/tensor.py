"""The section ``m6.parallel.tensor``: its keys, and what cannot be combined with them."""

from __future__ import annotations

from pydantic import Field

from m6.architecture.communication_volume import PlacementName, nearest_num_ranks, side
from m6.architecture.settings import ModelSettings
from m6.errors import UserError
from m6.validation import Section

_NAME = "m6.parallel.tensor"


class TensorSettings(Section):
    """Divides matrices over neighbouring ranks, which read the same micro-batches.

    Of routed experts they divide tokens: each rank computes a part of those of a micro-batch, by ``ep_size`` on the
    ranks of their experts.
    """

    placement: PlacementName = Field(
        "1d",
        description="division of a feed-forward's matrices: 1d by columns and rows (Megatron-LM), 2d on a square of "
        "ranks (SUMMA), 3d on a cube. Attention, shared experts and the token embedding are divided in "
        "each; norms and routers are whole",
    )
    sequence_parallel: bool = Field(
        False,
        description="divide also the tokens between the products: norms, dropout and the residual stream take 1 / "
        'num_ranks of their memory (Megatron-LM, arXiv 2205.05198); only with placement "1d"',
    )
    num_ranks: int = Field(ge=2, description="ranks of a group; divides the world size, for 2d a square, for 3d a cube")

    def describe(self) -> str:
        """The groups in words."""
        tokens = ", sequence parallelism" if self.sequence_parallel else ""
        return f"matrices divided over {self.num_ranks} ranks, placement {self.placement}{tokens}"

    def refusal(self, model: ModelSettings) -> str | None:
        """Why the matrices of a model cannot be divided so, and the nearest setting; None if they can."""
        q = side(self.placement, self.num_ranks)
        if self.sequence_parallel and self.placement != "1d":
            return (
                f'sequence_parallel with placement "{self.placement}": its feed-forwards divide tokens '
                'themselves; use placement "1d", or leave sequence_parallel out'
            )
        if q is None:
            shape = "square" if self.placement == "2d" else "cube"
            nearest = nearest_num_ranks(self.placement, self.num_ranks)
            return f'num_ranks {self.num_ranks} is no {shape}, as "{self.placement}" needs; use {nearest}, or "1d"'
        misfit = _misfit(self.placement, self.num_ranks, model)
        if misfit is None:
            return None
        key, size, parts = misfit
        fitting = (
            ranks
            for ranks in range(2, model.num_attention_heads + 1)
            if side(self.placement, ranks) is not None and _misfit(self.placement, ranks, model) is None
        )
        ranks = min(fitting, key=lambda ranks: abs(ranks - self.num_ranks), default=None)
        advice = f"no num_ranks fits, set {_NAME}=null" if ranks is None else f"use {ranks}"
        return (
            f'num_ranks {self.num_ranks} with placement "{self.placement}" divides m6.model.{key} by {parts}, but it '
            f"is {size}; {advice}"
        )


def _misfit(placement: PlacementName, num_ranks: int, model: ModelSettings) -> tuple[str, int, int] | None:
    """The first size that the ranks do not divide: its key, the size, and in how many parts it would be."""
    q = side(placement, num_ranks)
    assert q is not None
    blocks = q * q if placement == "3d" else q  # two axes of a cube divide the rows of a matrix
    sizes = [
        ("num_attention_heads", model.num_attention_heads, num_ranks),
        ("ffn_hidden_size", model.ffn_hidden_size, blocks),
        ("hidden_size", model.hidden_size, blocks),
    ]
    if model.moe is not None and model.moe_config().num_shared_experts:
        sizes.append(("ffn_hidden_size", model.ffn_hidden_size, num_ranks))
    for key, size, parts in sizes:
        if size % parts:
            return key, size, parts
    return None


def check_tensor(tensor: TensorSettings, model: ModelSettings) -> None:
    """Raises UserError if the ranks do not divide the matrices of the model."""
    refusal = tensor.refusal(model)
    if refusal is not None:
        raise UserError(f"{_NAME}: {refusal}")
