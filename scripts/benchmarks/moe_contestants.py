"""Expert layers compared at given sizes: ours, DeepSpeed's, transformers', and what they can at best come near to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe import MoEConfig, MoELayer
from moe.kernels import experts_op
from moe.kernels.products import GroupedProducts, LoopProducts, Products, choose_products
from moe.routing import Router, route

# How many contestants of two and of three matrices there are at most.
NUM_PLAIN, NUM_GATED = 11, 5
# Those of two matrices with weights of their own, the floor with two sets; those of three.
NUM_PLAIN_COPIES, NUM_GATED_COPIES = 9, 4


@dataclass(frozen=True)
class Cell:
    """A size: T tokens of width d, hidden width 4 d, E experts in Z prototypes, top_k of each."""

    num_tokens: int
    hidden_size: int
    num_experts: int
    num_prototypes: int = 1
    top_k: int = 1

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def choices(self) -> int:
        return self.num_prototypes * self.top_k

    @property
    def rows_per_expert(self) -> float:
        return self.num_tokens * self.choices / self.num_experts

    @property
    def routing(self) -> str:
        return f"{self.num_prototypes} top-1" if self.num_prototypes > 1 else f"top-{self.top_k}"

    @property
    def has_quadratic(self) -> bool:
        """Whether those take part whose backward pass makes a gradient of the whole stack for every expert."""
        return self.num_experts <= 32

    def __str__(self) -> str:
        return f"T {self.num_tokens}, d {self.hidden_size}, E {self.num_experts}, {self.routing}"


SMALL = (
    Cell(2048, 256, 8),
    Cell(2048, 256, 64),
    Cell(2048, 256, 16, num_prototypes=2),
    Cell(2048, 256, 32, num_prototypes=4),
    Cell(4096, 256, 16),
    Cell(2048, 512, 8),
)
# Both ends of every axis: 2,048 and 16,384 tokens, widths 256 and 1,024, 8 and 512 experts, one and eight choices.
AXES = (
    *SMALL,
    Cell(2048, 256, 8, top_k=2),
    Cell(2048, 256, 64, num_prototypes=8),
    Cell(2048, 1024, 8),
    Cell(16384, 256, 8),
    Cell(8192, 256, 64, top_k=2),
    Cell(8192, 256, 128, num_prototypes=4),
    Cell(8192, 512, 64, num_prototypes=2),
    Cell(16384, 256, 512),
    Cell(2048, 256, 512, num_prototypes=8),
)
GRIDS = {"small": SMALL, "axes": AXES}
BFLOAT16 = (Cell(512, 256, 8), Cell(2048, 256, 32, num_prototypes=2), Cell(8192, 256, 16))


def round_seconds(cells: Sequence[Cell], flops_per_s: float = 90e9) -> float:
    """Matrix products of one round of all contestants: 6 FLOPs, forward and backward, for each weight a row meets."""
    matrices = 2 * NUM_PLAIN + 3 * NUM_GATED
    return sum(6 * matrices * c.num_tokens * c.choices * c.hidden_size * c.ffn_size for c in cells) / flops_per_s


def held_bytes(cell: Cell) -> int:
    """Memory of all contestants in float32, at most: weights, inputs, and what one step adds."""
    matrix = 4 * cell.num_experts * cell.hidden_size * cell.ffn_size
    row = 4 * cell.num_tokens * cell.choices * cell.hidden_size
    gated = NUM_GATED_COPIES if cell.has_quadratic else NUM_GATED_COPIES - 2
    weights = (2 * NUM_PLAIN_COPIES + 3 * gated) * matrix
    inputs = 2 * (NUM_PLAIN_COPIES + gated) * row
    # Gradients of three matrices and of the expert in turn; h, a and their gradients, twice for padded capacities.
    step = 2 * 3 * matrix + 2 * (4 * 3 + 4) * 2 * row
    return weights + inputs + step


CAPACITY_FACTOR = 1.25
MOST_BYTES_BATCHED = 2 << 30
Run = Callable[[Tensor], Tensor]


# Ways to compute the products other than the chosen one, by the name of the contestant.
FORCED: dict[str, Callable[..., Products]] = {
    "ours, grouped_mm": lambda rows, counts, *weights: GroupedProducts(counts),
    "ours, loop": lambda rows, counts, *weights: LoopProducts(
        counts, torch.float32 if rows.dtype == torch.bfloat16 and not multiplies_bfloat16() else rows.dtype
    ),
}


def multiplies_bfloat16() -> bool:
    """Whether this processor, as oneDNN is told to see it, multiplies bfloat16 itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def ours(cell: Cell, **changes: object) -> tuple[nn.Module, Run]:
    config = MoEConfig(
        num_experts=cell.num_experts,
        num_prototypes=cell.num_prototypes,
        top_k=cell.top_k,
        **changes,  # type: ignore[arg-type]
    )
    layer = MoELayer(cell.hidden_size, cell.ffn_size, config)

    def run(x: Tensor) -> Tensor:
        output = layer(x)
        return output.hidden_states + 0 * output.aux_loss  # its gradient, too, is computed

    return layer, run


def k_times_top_1(cell: Cell) -> tuple[nn.Module, Run]:
    """Our layer without prototypes, Z times with E / Z experts, as M6-T's k top-1 is written down."""
    part = Cell(cell.num_tokens, cell.hidden_size, cell.num_experts // cell.num_prototypes)
    layers, runs = zip(*(ours(part) for _ in range(cell.num_prototypes)), strict=True)
    return nn.ModuleList(layers), lambda x: sum(run(x) for run in runs)


class Dense(nn.Module):
    """The same arithmetic on the same number of rows, for which the tokens are copied K times."""

    def __init__(self, cell: Cell, glu: bool) -> None:
        super().__init__()
        self.glu = glu
        self.input = nn.Linear(cell.hidden_size, (2 if glu else 1) * cell.ffn_size, bias=False)
        self.output = nn.Linear(cell.ffn_size, cell.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.input(rows)
        if self.glu:
            gate, up = hidden.chunk(2, -1)
            return self.output(F.silu(gate) * up)
        return self.output(F.gelu(hidden))


def dense(cell: Cell, glu: bool = False) -> tuple[nn.Module, Run]:
    layer = Dense(cell, glu)
    return layer, layer


class DenseFFN(nn.Module):
    """An expert of DeepSpeed's layer."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.input = nn.Linear(cell.hidden_size, cell.ffn_size, bias=False)
        self.output = nn.Linear(cell.ffn_size, cell.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.output(F.gelu(self.input(rows)))


def deepspeed_moe(cell: Cell, drop: bool) -> tuple[nn.Module, Run]:
    """DeepSpeed's layer; it has no prototypes, so one layer for each."""
    from deepspeed.moe.layer import MoE

    layers = nn.ModuleList()
    for _ in range(cell.num_prototypes):
        layer = MoE(
            cell.hidden_size,
            DenseFFN(cell),
            num_experts=cell.num_experts // cell.num_prototypes,
            k=cell.top_k,
            capacity_factor=CAPACITY_FACTOR,
            drop_tokens=drop,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
        layers.append(layer)

    def run(x: Tensor) -> Tensor:
        outputs = [layer(x) for layer in layers]
        return sum(output + 0 * aux_loss for output, aux_loss, _ in outputs)

    return layers, run


def autoep(cell: Cell) -> tuple[nn.Module, Run]:
    """The experts of DeepSpeed's AutoEP in the path it has for CPUs, behind our router: its layer wants a model."""
    from deepspeed.moe.ep_experts import GroupedExperts

    config = MoEConfig(num_experts=cell.num_experts, num_prototypes=cell.num_prototypes, top_k=cell.top_k)
    router = Router(cell.hidden_size, config)
    experts = GroupedExperts(cell.hidden_size, cell.ffn_size, cell.num_experts, use_grouped_mm=False)
    module = nn.ModuleList([router, experts])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)

    def run(x: Tensor) -> Tensor:
        routing, losses, _ = route(router(x), config, True)
        rows = experts(x.index_select(0, routing.tokens), routing.counts) * routing.gates[:, None]
        return torch.zeros_like(x).index_add(0, routing.tokens, rows.to(x.dtype)) + 0 * losses.mean

    return module, run


def switch(cell: Cell) -> tuple[nn.Module, Run]:
    """transformers' Switch, one layer for each prototype."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    size = cell.num_experts // cell.num_prototypes
    config = SwitchTransformersConfig(
        d_model=cell.hidden_size,
        d_ff=cell.ffn_size,
        num_experts=size,
        expert_capacity=int(CAPACITY_FACTOR * cell.num_tokens / size),
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        dense_act_fn="gelu",
        router_bias=False,
    )
    layers = nn.ModuleList(SwitchTransformersSparseMLP(copy.deepcopy(config)) for _ in range(cell.num_prototypes))
    return layers, lambda x: sum(layer(x[None])[0] for layer in layers)


def mixtral(cell: Cell, implementation: str) -> tuple[nn.Module, Run]:
    """transformers' Mixtral, whose experts are gated; K of all experts where ours takes one of each prototype."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=cell.hidden_size,
        intermediate_size=cell.ffn_size,
        num_local_experts=cell.num_experts,
        num_experts_per_tok=cell.choices,
        router_jitter_noise=0.0,
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block, lambda x: block(x[None])[0]


class Floor:
    """The matrix products alone: six for each expert, with equally many rows, in memory that is there; the router's."""

    def __init__(self, cell: Cell, dtype: torch.dtype) -> None:
        experts, width, inner = cell.num_experts, cell.hidden_size, cell.ffn_size
        self.rows = max(1, round(cell.rows_per_expert))
        shapes = {"x": (self.rows, width), "h": (self.rows, inner), "y": (self.rows, width)}
        self.x, self.h, self.y = (torch.randn(experts, *shape, dtype=dtype).unbind(0) for shape in shapes.values())
        self.w_in, self.d_w_in = (torch.randn(experts, inner, width, dtype=dtype).unbind(0) for _ in range(2))
        self.w_out, self.d_w_out = (torch.randn(experts, width, inner, dtype=dtype).unbind(0) for _ in range(2))
        self.tokens, self.router = torch.randn(cell.num_tokens, width), torch.randn(experts, width)
        self.logits = torch.randn(cell.num_tokens, experts)

    @torch.no_grad()
    def __call__(self) -> None:
        for x, h, y, w_in, w_out in zip(self.x, self.h, self.y, self.w_in, self.w_out, strict=True):
            torch.mm(x, w_in.T, out=h)
            torch.mm(h, w_out.T, out=y)
        for x, h, y, w_in, w_out, d_w_in, d_w_out in zip(
            self.x, self.h, self.y, self.w_in, self.w_out, self.d_w_in, self.d_w_out, strict=True
        ):
            torch.mm(y, w_out, out=h)
            torch.mm(y.T, h, out=d_w_out)
            torch.mm(h.T, x, out=d_w_in)
            torch.mm(h, w_in, out=y)
        torch.mm(self.tokens, self.router.T, out=self.logits)
        torch.mm(self.logits, self.router)
        torch.mm(self.logits.T, self.tokens)


class Step:
    """Forward and backward of a layer, with all gradients; called once for each measurement."""

    def __init__(self, module: nn.Module, run: Run, rows: int, width: int, dtype: torch.dtype) -> None:
        self.module, self.run = module.to(dtype).train(), run
        self.x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(rows, width, dtype=dtype)

    def __call__(self) -> None:
        self.run(self.x).backward(self.grad)

    def free_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None

    def saved_bytes(self) -> int:
        """Bytes of the distinct storages that autograd keeps for the backward pass, weights excepted."""
        known = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = self.run(self.x)
        del kept
        return sum(sizes.values())


class ForcedStep(Step):
    """A step of our layer with one of ``FORCED``, on the weights and the input of another step."""

    def __init__(self, step: Step, products: Callable[..., Products]) -> None:
        self.module, self.run, self.x, self.grad = step.module, step.run, step.x, step.grad
        self.products = products

    def __call__(self) -> None:
        with mock.patch.object(experts_op, "choose_products", self.products):
            super().__call__()


def chosen_products(cell: Cell, layer: MoELayer) -> str:
    """The name of those that our layer takes for rows in its weights' type."""
    weights = [layer.experts.w_in, layer.experts.w_out]
    rows = weights[0].new_empty(cell.num_tokens * cell.choices, cell.hidden_size)
    counts = torch.full((cell.num_experts,), len(rows) // cell.num_experts)
    return type(choose_products(rows, counts, *weights)).__name__.removesuffix("Products").lower()
