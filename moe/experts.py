"""The experts' feed-forward networks, with stacked weights."""

import functools

import torch
from torch import Tensor, nn

from moe.activations import ACTIVATIONS
from moe.autograd import autocast_dtype
from moe.config import MoEConfig
from moe.kernels.experts_op import Pairs, apply_experts


class _FeedForward(nn.Module):
    """The parameters of a feed-forward network, for experts and shared experts."""

    b_in: nn.Parameter | None
    b_out: nn.Parameter | None

    def _add_parameters(
        self,
        stack: tuple[int, ...],
        hidden_size: int,
        inner_size: int,
        config: MoEConfig,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Makes weights and biases for ``inner_size`` units. Their first dimensions are ``stack``."""
        rows = ACTIVATIONS[config.activation].inputs_per_unit * inner_size
        empty = functools.partial(torch.empty, device=device, dtype=dtype)
        self.w_in = nn.Parameter(empty(*stack, rows, hidden_size))
        self.w_out = nn.Parameter(empty(*stack, hidden_size, inner_size))
        self.b_in = nn.Parameter(empty(*stack, rows)) if config.bias else None
        self.b_out = nn.Parameter(empty(*stack, hidden_size)) if config.bias else None


class Experts(_FeedForward):
    """E networks y = w_out act(w_in x + b_in) + b_out, without the biases by default as in M6-T (arXiv 2105.15082).

    ``w_in`` is [E, F, D] and ``w_out`` [E, D, F]; for swiglu ``w_in`` is [E, 2 F, D], first the rows of the gate, then
    the rows of the value. ``b_in`` [E, F or 2 F] and ``b_out`` [E, D] exist with ``config.bias``.

    Every parameter has the attributes ``first_expert``, the number of its first expert in the whole layer, and
    ``num_global_experts``, the layer's number of experts. Initialisation and checkpoints use them to identify an expert
    on any rank.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        config: MoEConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.parameter_attributes: dict[str, int | bool | str] = {
            "first_expert": 0,
            "num_global_experts": config.num_experts,
        }
        self.adapter_scale: float | None = None
        self._add_parameters((config.num_experts,), hidden_size, ffn_hidden_size, config, device, dtype)

    def keep_local(self, first_expert: int, num_local_experts: int, group_name: str) -> None:
        """Keeps a range of experts and drops the others. DeepSpeed averages their gradients only in ``group_name``."""
        self.parameter_attributes |= {
            "first_expert": first_expert,
            "allreduce": False,
            "group_name": group_name,
            "tensor_model_parallel": True,  # DeepSpeed then counts them on each rank of a tensor group for the norm
        }
        for name, parameter in list(self.named_parameters()):
            # A clone, because a view would keep all experts in memory.
            local = parameter.detach().narrow(0, first_expert, num_local_experts).clone()
            setattr(self, name, nn.Parameter(local, requires_grad=parameter.requires_grad))

    def add_adapters(self, rank: int, scale: float) -> None:
        """Freezes the parameters and adds a trained product to each expert's matrices: W + scale * B A.

        For the matrices NAME [E, Q, P] this adds NAME_lora_A [E, rank, P] and NAME_lora_B [E, Q, rank] (LoRA, arXiv
        2106.09685). Each forward pass makes the sums W + scale * B A of all experts on this rank; they take as much
        memory as the matrices. The values of new parameters are not set.
        """
        self.adapter_scale = scale
        self.requires_grad_(False)
        for name in ("w_in", "w_out"):
            weight = getattr(self, name)
            experts, rows, columns = weight.shape
            for part, shape in (("A", (experts, rank, columns)), ("B", (experts, rows, rank))):
                self.register_parameter(f"{name}_lora_{part}", nn.Parameter(weight.new_empty(shape)))

    def _matrices(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, name)
        if self.adapter_scale is None:
            return weight
        down, up = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
        return torch.baddbmm(weight, up, down, alpha=self.adapter_scale)

    def draw_dropout(self, num_rows: int, device: torch.device) -> Tensor | None:
        """Draws the mask of hidden units kept by dropout, bool [R, F]; None if dropout keeps all."""
        dropout = self.config.expert_dropout if self.training else 0.0
        return torch.rand(num_rows, self.w_out.shape[2], device=device) >= dropout if dropout else None

    def forward(
        self, rows: Tensor, counts: Tensor, pairs: Pairs | None = None, row_values: Tensor | None = None
    ) -> Tensor:
        """Applies each expert to its rows.

        Args:
            rows: [R, D] sorted by expert; with ``pairs`` the tokens [T, D], to be copied into rows.
            counts: [E] int64, the number of rows of each expert; some may be 0, and the sum is R.
            pairs: the token and the gate of each row.
            row_values: the rows' dropout mask, from an earlier ``draw_dropout``; None: the mask is drawn here.

        Returns:
            [R, D]; with ``pairs`` the sum of each token's rows weighted by their gates, [T, D]. The type is autocast's
            if autocast is on.

        Raises:
            ValueError: the rows and the weights have different types.
        """
        weights = (self._matrices("w_in"), self._matrices("w_out"), self.b_in, self.b_out)
        dtype = autocast_dtype(rows)
        if dtype is None:
            check_dtype(rows, self.w_in)
        else:
            rows = rows.to(dtype)  # the operator converts the weights: autograd would keep copies of them made here

        mask = row_values
        if mask is None:
            mask = self.draw_dropout(len(rows) if pairs is None else len(pairs.source), rows.device)
        dropout = 0.0 if mask is None else self.config.expert_dropout
        # Without a backward pass the operator must not keep its inner values.
        inputs = (rows, *weights, None if pairs is None else pairs.gates)
        keep = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
        return apply_experts(
            rows,
            *(pairs or (None,) * 4),
            counts,
            *weights,
            mask,
            dropout,
            self.config.activation,
            self.config.recompute_activation,
            keep,
        )

    # Assignments, loading of weights, moves off the meta device and copies all make new parameter objects without the
    # attributes. The methods below set them again.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter and sets its attributes."""
        super().register_parameter(name, param)
        self._mark_parameters()

    def _apply(self, *args: object, **kwargs: object) -> "Experts":
        super()._apply(*args, **kwargs)
        self._mark_parameters()
        return self

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        for parameter in self.parameters():
            for name, value in self.parameter_attributes.items():
                setattr(parameter, name, value)


def check_dtype(rows: Tensor, weight: Tensor) -> None:
    """Checks the type of the rows.

    Raises:
        ValueError: it differs from the type of the weights.
    """
    if rows.dtype != weight.dtype:
        raise ValueError(f"the experts' weights are {weight.dtype}, but the tokens are {rows.dtype}")


class SharedExperts(_FeedForward):
    """S shared experts for every token, as one network of width S * F: DeepSeekMoE (arXiv 2401.06066), equation 9.

    With ``config.shared_expert_gate`` the output is multiplied by sigmoid(w_gate x), one number for each token, as in
    transformers' Qwen2-MoE. Initial weights near 0 make this factor about 1/2.

    The parameters are the same as in ``Experts`` without the first dimension, and with the gate also ``w_gate`` [1, D].
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        config: MoEConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        width = config.num_shared_experts * ffn_hidden_size
        self._add_parameters((), hidden_size, width, config, device, dtype)
        gate = torch.empty(1, hidden_size, device=device, dtype=dtype) if config.shared_expert_gate else None
        self.w_gate = None if gate is None else nn.Parameter(gate)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the output [..., D] of tokens [..., D]."""
        tokens = tokens.to(autocast_dtype(tokens) or tokens.dtype)  # one converted copy for both linear maps
        hidden = self._inner(tokens)
        if self.config.activation == "swiglu":
            gate, up = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * up
        else:
            hidden = nn.functional.gelu(hidden) if self.config.activation == "gelu" else hidden.relu()
        hidden = nn.functional.dropout(hidden, self.config.expert_dropout, self.training)
        output = self._outer(hidden)
        return output if self.w_gate is None else output * nn.functional.linear(tokens, self.w_gate).sigmoid()

    # Two methods for the two products, so that a tensor-parallel model can replace them.

    def _inner(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(tokens, self.w_in, self.b_in)

    def _outer(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.w_out, self.b_out)
