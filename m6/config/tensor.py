"""The section ``m6.parallel.tensor``: its keys, and what cannot be combined with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from m6.architecture.received import (
    PlacementName,
    nearest_num_ranks,
    received_by_expert,
    received_by_pair,
    side,
)
from m6.architecture.settings import ModelSettings
from m6.config.deepspeed import DeepSpeedSettings
from m6.errors import UserError
from m6.validation import Section

if TYPE_CHECKING:
    from m6.config.sections import M6Settings

_NAME = "m6.parallel.tensor"


class TensorSettings(Section):
    """Divides the matrices of dense layers over neighbouring ranks, which read the same micro-batches."""

    placement: PlacementName = Field(
        "1d",
        description="how the matrices of a feed-forward are divided: 1d by columns and rows (Megatron-LM), 2d on a "
        "square of ranks (SUMMA), 3d on a cube. Heads of attention are divided in each of them; embeddings, norms and "
        "the head of the model are whole on each rank",
    )
    num_ranks: int = Field(ge=2, description="ranks of a group; divides the world size, for 2d a square, for 3d a cube")

    def describe(self) -> str:
        """The groups in words."""
        return f"matrices divided over {self.num_ranks} ranks, placement {self.placement}"

    def refusal(self, model: ModelSettings) -> str | None:
        """Why the matrices of a model cannot be divided so, and the nearest setting; None if they can."""
        q = side(self.placement, self.num_ranks)
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
    for key, size, parts in (
        ("num_attention_heads", model.num_attention_heads, num_ranks),
        ("ffn_hidden_size", model.ffn_hidden_size, blocks),
        ("hidden_size", model.hidden_size, blocks),
    ):
        if size % parts:
            return key, size, parts
    return None


def check_tensor(tensor: TensorSettings, run: M6Settings, deepspeed: DeepSpeedSettings, model: ModelSettings) -> None:
    """Raises UserError if the run asks for something that does not work with divided matrices, or never wins."""
    if run.moe is not None:
        raise UserError(f"{_NAME}: {experts_reason(tensor, run, deepspeed, model)}; set {_NAME}=null")
    refusal = tensor.refusal(model)
    if refusal is not None:
        raise UserError(f"{_NAME}: {refusal}")
    if deepspeed.zero_stage > 1:
        raise UserError(
            f"zero_optimization.stage {deepspeed.zero_stage} was not tried with {_NAME}, which divides weights and "
            "gradients already; use stage 1 or 0"
        )
    if deepspeed.optimizer_type != "AdamW":
        raise UserError(
            f'optimizer.type "{deepspeed.optimizer_type}" takes means or norms over whole matrices, of which a rank '
            f'has a part with {_NAME}; use "AdamW"'
        )
    for section, found, reason in _refused_sections(run, deepspeed, model):
        if found:
            raise UserError(f"{section}: {reason}; leave one of them out, or {_NAME}=null")


def experts_reason(tensor: TensorSettings, run: M6Settings, deepspeed: DeepSpeedSettings, model: ModelSettings) -> str:
    """Why the matrices of experts are not divided: what ranks would receive with a placement, and with ``ep_size``."""
    moe, ranks = model.moe_config(), tensor.num_ranks
    q = side(tensor.placement, ranks)
    ranks = ranks if q is not None else nearest_num_ranks(tensor.placement, ranks)
    choices = moe.num_prototypes * moe.top_k
    tokens = max(1, round(deepspeed.micro_batch_size * run.data.sequence_length * choices / moe.num_experts))
    divided = received_by_pair(tensor.placement, ranks, tokens, model.hidden_size, model.ffn_hidden_size)
    whole = received_by_expert(ranks, tokens, model.hidden_size)
    return (
        f"experts of m6.moe are divided by m6.training.ep_size already, and an expert's product is tiny: for its "
        f"{tokens:,} tokens of a micro-batch each of {ranks} ranks would receive {divided:,.0f} elements with "
        f'placement "{tensor.placement}", against {whole:,.0f} with ep_size {ranks}'
    )


def _refused_sections(
    run: M6Settings, deepspeed: DeepSpeedSettings, model: ModelSettings
) -> list[tuple[str, bool, str]]:
    zero = deepspeed.keys.get("zero_optimization", {})
    return [
        (
            "m6.parallel.pipeline",
            run.parallel.pipeline is not None,
            f"stages of whole layers and {_NAME} were not tried together",
        ),
        (
            "m6.model.attention_dropout",
            model.attention_dropout > 0,
            f"ranks of {_NAME} would drop the same scores in different heads; hidden_dropout works",
        ),
        (
            'm6.training.deterministic "any_world"',
            run.training.deterministic is not None,
            f"it adds up whole gradients of one rank, which has a part of them with {_NAME}",
        ),
        (
            "zero_optimization.offload_optimizer",
            "offload_optimizer" in zero,
            f"states in host memory were not tried with {_NAME}",
        ),
        ("m6.lora", run.lora is not None, f"adapters are made for whole matrices, not for {_NAME}"),
        (
            "m6.pseudo_to_real",
            run.pseudo_to_real is not None,
            f"layers that share weights were not tried with {_NAME}",
        ),
        (
            "m6.communication",
            run.communication.compresses,
            f"it compresses gradients of whole models, of which a rank of {_NAME} has a part",
        ),
        ("m6.gradient_delay", run.gradient_delay is not None, f"gradients one step late were not tried with {_NAME}"),
        ("m6.elastic", run.elastic is not None, f"a new plan for other nodes knows no {_NAME}"),
        ("m6.samples", run.samples is not None, f"no rank of {_NAME} has the whole model, which draws"),
    ]
