"""The experts' feed-forward networks as stacked weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe.config import MoEConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": nn.functional.gelu, "relu": nn.functional.relu}


class Experts(nn.Module):
    """E two-matrix networks y = w_out act(w_in x), without biases as in M6-T (arXiv 2105.15082).

    Every parameter carries the attributes ``first_expert``, the number of its first expert in the whole layer,
    and ``num_global_experts``, the layer's number of experts: values that belong to an expert (initialisation,
    checkpoints) are found by them whichever rank holds it.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.parameter_attributes: dict[str, int | bool | str] = {
            "first_expert": 0,
            "num_global_experts": config.num_experts,
        }
        self.w_in = nn.Parameter(torch.empty(config.num_experts, ffn_hidden_size, hidden_size))
        self.w_out = nn.Parameter(torch.empty(config.num_experts, hidden_size, ffn_hidden_size))

    def keep_local(self, first_expert: int, num_local_experts: int, group_name: str) -> None:
        """Cuts the weights to a range of experts, which DeepSpeed averages inside ``group_name`` alone."""
        self.parameter_attributes |= {
            "first_expert": first_expert,
            "allreduce": False,
            "group_name": group_name,
        }
        for name, parameter in list(self.named_parameters()):
            local = parameter.detach().narrow(0, first_expert, num_local_experts).clone()
            setattr(self, name, nn.Parameter(local, requires_grad=parameter.requires_grad))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Applies expert e to its rows.

        Args:
            rows: [R, D] sorted by expert.
            counts: [E] int64 rows of each expert, some may be 0; sums to R.

        Returns:
            [R, D]; in autocast's data type where autocast is on.
        """
        w_in: Tensor = self.w_in
        w_out: Tensor = self.w_out
        device = rows.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            rows, w_in, w_out = rows.to(dtype), w_in.to(dtype), w_out.to(dtype)

        if _grouped_mm_is_valid(rows, w_in):
            ends = counts.cumsum(0, dtype=torch.int32)
            hidden = self.activation(nn.functional.grouped_mm(rows, w_in.mT, offs=ends))
            return nn.functional.grouped_mm(hidden, w_out.mT, offs=ends)

        # unbind, because the backward of w[e] makes one zero tensor of the full stack per expert.
        outputs = [
            nn.functional.linear(self.activation(nn.functional.linear(part, into)), out)
            for part, into, out in zip(rows.split(counts.tolist()), w_in.unbind(0), w_out.unbind(0), strict=True)
        ]
        return torch.cat(outputs)

    # Parameters come anew on assignment (also when weights are loaded), on moves off the meta device and on copying.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
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


def _grouped_mm_is_valid(rows: Tensor, w_in: Tensor) -> bool:
    """Whether one call may compute all experts.

    Forward and backward on one CPU core in float32, it takes 0.55 to 0.9 of the loop's time at up to 64 rows an
    expert and 0.95 to 1.1 of it at 256 and more, where a large batch's fresh memory can make it 1.15.
    It has no float64, no empty input, and wants every row of the operands to start at a multiple of 16 bytes.
    """
    aligned = all(size * rows.element_size() % 16 == 0 for size in w_in.shape[1:])
    return aligned and len(rows) > 0 and rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
