"""The computation and communication of one rank for one micro-batch, by distinct block."""

from __future__ import annotations

from dataclasses import dataclass

from m6.architecture.communication_volume import side
from m6.config.run import RunConfig
from m6.model.patch_encoders import patch_products
from m6.planning.cost.activations import Activations
from m6.planning.cost.folding import UniqueLayers
from m6.planning.cost.layout import ParallelLayout
from m6.training.sizes import FP32, BatchShape, Precision
from moe.dispatch_dtype import CODECS

# Operators of one forward pass: of a block, and of the embeddings or the head.
_DENSE_OPERATORS = 20
_SPARSE_OPERATORS = 70
_PART_OPERATORS = 50  # additional ones for each further part of the exchange of tokens; counted: 22 to 90
_OUTER_OPERATORS = 60


@dataclass(frozen=True)
class Matmul:
    """``count`` products [m, k] x [k, n].

    Attributes:
        grouped: whether one call computes all of them.
        unwritten: elements of each product's operands and result kept on the chip by a fused kernel.
    """

    m: int
    n: int
    k: int
    dtype: str
    count: int = 1
    grouped: bool = False
    unwritten: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def moved_bytes(self) -> int:
        """Bytes read as operands and written as results by all products."""
        elements = self.m * self.k + self.k * self.n + self.m * self.n - self.unwritten
        return elements * self.count * (4 if self.dtype in ("fp32", "tf32") else 2)


@dataclass(frozen=True)
class RoutedRows:
    """The exchange of one micro-batch's tokens.

    Attributes:
        tokens: real tokens.
        pairs: (token, expert) pairs within the capacity.
        to_experts: bytes of a row in the dispatch.
        from_experts: bytes of a row in the combine.
    """

    tokens: int
    pairs: int
    to_experts: int
    from_experts: int


@dataclass(frozen=True)
class BlockWork:
    """The forward pass of one block on one micro-batch.

    Attributes:
        matmuls: the products of the forward pass; their backward pass costs twice as much.
        saved_bytes: kept for the backward pass; the time of elementwise operators follows from them.
        routed: the exchange with experts on other ranks; None if there are none.
        operators: number of operators, for the time of launches.
        recomputed: whether activation checkpointing computes the block a second time.
        shared: the products of shared experts in ``matmuls``. They overlap with the exchange of tokens.
        whole_bytes: the part of ``saved_bytes`` on each rank of a tensor group, for whole hidden states.
        deferred: the products in ``matmuls`` with deferred gradients of weights when micro-batches are interleaved, see
            ``moe.deferred_gradients``.
        is_sparse: whether its feed-forward is a layer of experts.
        reduced_bytes: of the all-reduce of embeddings or of their gradients over a tensor group.
    """

    matmuls: tuple[Matmul, ...]
    saved_bytes: int
    routed: RoutedRows | None
    operators: int
    recomputed: bool
    shared: tuple[Matmul, ...] = ()
    whole_bytes: int = 0
    deferred: tuple[Matmul, ...] = ()
    is_sparse: bool = False
    reduced_bytes: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return sum(matmul.flops for matmul in self.matmuls)


def work_of(
    config: RunConfig, folded: UniqueLayers, batch: BatchShape, layout: ParallelLayout
) -> list[tuple[BlockWork, int]]:
    """The distinct blocks, and how often each is computed.

    Under expert parallelism a rank is assumed to receive as many rows as it sends. Tensor parallelism splits the inner
    width of each pair of matrices. 2-D and 3-D also split the other sides of the matrices of a feed-forward.
    """
    ep_size, tp_size = layout.ep_size, layout.tp_size
    whole_states = layout.placement != "megatron"
    model, dtype, precision = folded.config, config.deepspeed.product_dtype, Precision.of(config)
    activations = Activations(config, batch)
    width, inner, tokens = model.hidden_size, model.ffn_hidden_size // tp_size, batch.rows * batch.sequence_length
    heads = max(1, model.num_attention_heads // tp_size)
    length, head = batch.sequence_length, model.hidden_size // model.num_attention_heads
    # The fused kernel reads queries, keys and values, and writes the result. It computes every score: the mask is a
    # boolean tensor, and no kernel skips scores by it. Dropout of scores needs a kernel with written scores, see
    # ``Activations``. The mask and written scores are among the saved bytes.
    unwritten = 0 if model.attention_dropout else length**2
    attention = (
        Matmul(tokens, 3 * width // tp_size, width, dtype),
        Matmul(length, length, head, dtype, batch.rows * heads, unwritten=unwritten),
        Matmul(length, head, length, dtype, batch.rows * heads, unwritten=unwritten),
        Matmul(tokens, width, width // tp_size, dtype),
    )
    deferred: tuple[Matmul, ...]
    result: list[tuple[BlockWork, int]] = []
    for block, count, _ in folded.blocks:
        if count == 0:
            continue
        if block.type == "dense":
            saved = activations.block(sparse=False)
            # Norms, dropout and the residual stream: five vectors of a block (arXiv 2205.05198, equation 2).
            whole = (
                min(saved, 5 * activations.block_input())
                if tp_size > 1 and whole_states and not layout.sequence_parallel
                else 0
            )
            ffn = _feed_forward(layout, tokens, width, model.ffn_hidden_size, dtype)
            deferred = (attention[0], attention[-1], *ffn)
            work = BlockWork(attention + ffn, saved, None, _DENSE_OPERATORS, True, whole_bytes=whole, deferred=deferred)
        elif block.type == "sparse":
            moe = model.moe_config()
            parts = moe.exchange_parts(ep_size)
            # Megatron-LM divides the matrices of experts over a tensor group, our engine their tokens.
            shares, expert_inner = tp_size // layout.outer_parts, model.ffn_hidden_size // layout.outer_parts
            rows = activations.rows() // shares
            local = moe.num_experts // ep_size * parts  # products of the experts of this rank
            each = max(1, round(rows / local))
            units = 2 if moe.activation == "swiglu" else 1
            inner_inputs = inner * units
            experts: tuple[Matmul, ...] = (
                Matmul(batch.real, moe.num_experts, width, "fp32"),
                Matmul(each, expert_inner * units, width, dtype, local, grouped=True),
                Matmul(each, width, expert_inner, dtype, local, grouped=True),
            )
            shared_experts: tuple[Matmul, ...] = ()
            if moe.num_shared_experts:
                shared = moe.num_shared_experts
                rows_in = shared * inner_inputs + int(moe.shared_expert_gate)
                shared_experts = (
                    Matmul(batch.real, rows_in, width, dtype),
                    Matmul(batch.real, width, shared * inner, dtype),
                )
            routed = None
            if ep_size > 1:
                to_experts, from_experts = CODECS[moe.dispatch_dtype]
                routed = RoutedRows(
                    tokens=batch.real // shares,
                    pairs=rows,
                    to_experts=to_experts.row_bytes(width, precision.residual),
                    from_experts=from_experts.row_bytes(width, precision.compute),
                )
            saved = activations.block(sparse=True)
            products = attention + experts + shared_experts
            operators = _SPARSE_OPERATORS + (parts - 1) * _PART_OPERATORS
            deferred = (attention[0], attention[-1], experts[0])
            work = BlockWork(
                products, saved, routed, operators, True, shared_experts, deferred=deferred, is_sparse=True
            )
        elif block.type == "embeddings":
            patches = batch.pictures * model.num_patches
            products = tuple(
                Matmul(patches * each.rows, each.outputs, each.inputs, dtype)
                for each in (patch_products(model) if patches else ())
            )
            saved = activations.embeddings() + 3 * activations.vectors * precision.residual
            whole = saved if whole_states else 0
            reduced = tokens * width * precision.residual
            work = BlockWork(products, saved, None, _OUTER_OPERATORS, False, whole_bytes=whole, reduced_bytes=reduced)
        else:
            columns = model.vocab_size // tp_size
            head_product = (Matmul(batch.targets, columns, width, dtype),) if batch.targets else ()
            saved = activations.norm() + activations.head() + 2 * batch.targets * model.vocab_size * FP32
            whole = activations.norm() if whole_states else 0
            reduced = batch.targets * width * precision.residual
            work = BlockWork(
                head_product, saved, None, _OUTER_OPERATORS, False, whole_bytes=whole, reduced_bytes=reduced
            )
        result.append((work, count))
    return result


def _feed_forward(layout: ParallelLayout, tokens: int, width: int, inner: int, dtype: str) -> tuple[Matmul, Matmul]:
    """The products of a dense feed-forward on one rank."""
    if layout.placement == "1d" or layout.placement == "megatron":
        inner //= layout.tp_size
        return Matmul(tokens, inner, width, dtype), Matmul(tokens, width, inner, dtype)
    q = side(layout.placement, layout.tp_size) or 1
    tokens = -(-tokens // q)
    if layout.placement == "2d":
        return Matmul(tokens, inner // q, width, dtype), Matmul(tokens, width // q, inner, dtype)
    width, inner = width // q, inner // q
    return Matmul(tokens, inner, width, dtype), Matmul(tokens, width, inner, dtype)
