"""All experts of a layer as one operator with a hand-written backward pass.

    rows = tokens[source]                     h = rows w_in^T + b_in          a = act(h) * mask / (1 - dropout)
    y = a w_out^T + b_out                     output_t = sum over the rows r of token t:  gate_r * y_r

A single operator has two advantages: it chooses the tensors saved for the backward pass, and compilers see no
data-dependent shapes.

It saves the tokens, h, a and y. With ``recompute`` it saves only the tokens and h, and computes the gradient of a gate
as <g_r w_out, a_r> + <g_r, b_out> instead of <g_r, y_r>, where g_r is the gradient of the output of row r's token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from moe.activations import ACTIVATIONS
from moe.autograd import without_autocast
from moe.kernels.products import choose_products


class Pairs(NamedTuple):
    """The (token, expert) pairs of R rows sorted by expert.

    Attributes:
        source: [R] int64, the index of each row's token.
        gates: [R], in float32 or wider.
        by_token: [R] int64, the indices of the rows sorted by token.
        offsets: [T] int64, where each token's rows begin in ``by_token``.
    """

    source: Tensor
    gates: Tensor
    by_token: Tensor
    offsets: Tensor


def sum_by_token(rows: Tensor, pairs: Pairs, weigh: bool) -> Tensor:
    """Sums rows [R, D] by token into [T, D], in a fixed order and in the gates' precision.

    Args:
        weigh: whether to multiply each row by its gate.
    """
    # embedding_bag sums each bag in order; the order of index_add is not fixed on a GPU.
    weights = pairs.gates.index_select(0, pairs.by_token) if weigh else None
    total = torch.nn.functional.embedding_bag(
        pairs.by_token, rows.to(pairs.gates.dtype), pairs.offsets, mode="sum", per_sample_weights=weights
    )
    return total.to(rows.dtype)


def compute_experts(
    tokens: Tensor,
    source: Tensor | None,
    gates: Tensor | None,
    by_token: Tensor | None,
    offsets: Tensor | None,
    counts: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    mask: Tensor | None,
    dropout: float,
    activation: str,
    recompute: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the experts.

    Args:
        tokens: [T, D] with ``source``, ``gates``, ``by_token`` and ``offsets`` as in ``Pairs``. If these are None:
            the rows themselves [R, D], sorted by expert; no gates are applied.
        counts: [E] int64, the number of rows of each expert.
        w_in, w_out, b_in, b_out: [E, H, D], [E, D, F], [E, H], [E, D]; H is F, or 2 F for swiglu. Each pass converts
            them to the type of the tokens, so that no copy is kept between passes.
        mask: bool [R, F], true for hidden units kept by dropout; these are divided by 1 - ``dropout``.
        activation: a key of ``ACTIVATIONS``.
        recompute: whether the backward pass computes the activation again.
        save: whether a backward pass may follow.

    Returns:
        The output [T, D] or [R, D], and the tensors to save: h [R, H], a [R, F], y [R, D]. A tensor not needed by the
        backward pass is empty.
    """
    with without_autocast(tokens):
        pairs = _pairs(source, gates, by_token, offsets)
        w_in, w_out = w_in.to(tokens.dtype), w_out.to(tokens.dtype)
        rows = tokens if pairs is None else tokens.index_select(0, pairs.source)
        products = choose_products(rows, counts, w_in, w_out)
        h = products.forward(rows, w_in)
        if b_in is not None:
            h += _spread(b_in, counts, rows)
        a = _activate(h, mask, dropout, activation, w_out.shape[2])
        y = products.forward(a, w_out)
        if b_out is not None:
            y += _spread(b_out, counts, rows)
        if not save:
            h = y.new_empty(0)
        if not save or recompute:
            a = y.new_empty(0)
        if pairs is None:
            return y, h, a, y.new_empty(0)
        return sum_by_token(y, pairs, weigh=True), h, a, y if save and not recompute else y.new_empty(0)


# Here "moe". An exported model carries a copy of this file under another name. In a process with both, two operators of
# the same name would break each other.
_NAMESPACE = __name__.removesuffix(".kernels.experts_op").replace(".", "_")

experts_op = library.custom_op(f"{_NAMESPACE}::experts", compute_experts, mutates_args=())


@library.custom_op(f"{_NAMESPACE}::experts_backward", mutates_args=())
def experts_backward_op(
    grad: Tensor,
    h: Tensor,
    a: Tensor,
    y: Tensor,
    tokens: Tensor,
    source: Tensor | None,
    gates: Tensor | None,
    by_token: Tensor | None,
    offsets: Tensor | None,
    counts: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    mask: Tensor | None,
    dropout: float,
    activation: str,
    recompute: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of tokens, gates, w_in, w_out, b_in and b_out, each empty if it is not ``needed``."""
    need_tokens, need_gates, need_w_in, need_w_out, need_b_in, need_b_out = needed
    need_h = need_tokens or need_w_in or need_b_in
    with without_autocast(tokens):
        pairs = _pairs(source, gates, by_token, offsets)
        own_w_in, own_w_out = w_in.to(tokens.dtype), w_out.to(tokens.dtype)
        rows, g = tokens, grad.contiguous()
        if pairs is not None:
            rows, g = tokens.index_select(0, pairs.source), grad.index_select(0, pairs.source)
        scale = None if pairs is None else pairs.gates[:, None]
        products = choose_products(rows, counts, own_w_in, own_w_out)
        gated = g if scale is None else (g * scale).to(g.dtype)
        d_tokens, d_gates, d_w_in, d_w_out, d_b_in, d_b_out = (grad.new_empty(0) for _ in range(6))

        if recompute:
            a = _activate(h, mask, dropout, activation, w_out.shape[2])
        if need_h or (need_gates and recompute):
            d_a = products.input_grad(g if recompute else gated, own_w_out)
        if need_gates and pairs is not None:
            d_gates = _dot(d_a, a, pairs) if recompute else _dot(g, y, pairs)
            if recompute and b_out is not None:
                d_gates += _dot(g, _spread(b_out, counts, rows), pairs)
        if need_w_out:
            d_w_out = products.weight_grad(gated, a).to(w_out.dtype)
        if need_b_out and b_out is not None:
            d_b_out = products.bias_grad(gated).to(b_out.dtype)
        if not need_h:
            return d_tokens, d_gates, d_w_in, d_w_out, d_b_in, d_b_out

        if mask is not None:
            d_a.mul_(mask).mul_(1 / (1 - dropout))
        d_h = ACTIVATIONS[activation].backward(d_a, h, d_a if h.shape == d_a.shape else torch.empty_like(h))
        # With recompute d_h lacks the gates, to save a pass over [R, H]. Rows of D are narrower: apply them there.
        late = scale if recompute else None
        if need_tokens:
            d_rows = products.input_grad(d_h, own_w_in)
            d_rows = d_rows if late is None else d_rows.mul_(late)
            d_tokens = d_rows if pairs is None else sum_by_token(d_rows, pairs, weigh=False)
        if need_w_in:
            d_w_in = products.weight_grad(d_h, rows if late is None else rows.mul_(late)).to(w_in.dtype)
        if need_b_in and b_in is not None:
            d_b_in = products.bias_grad(d_h if late is None else d_h.mul_(late)).to(b_in.dtype)
        return d_tokens, d_gates, d_w_in, d_w_out, d_b_in, d_b_out


@experts_op.register_fake
def _(tokens: Tensor, source: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, w_in, w_out, _b_in, _b_out, _mask, _dropout, _activation, recompute, save = others
    num_tokens = tokens.shape[0]  # len() would ask for a number, but a compiler only has a symbol
    num_rows = num_tokens if source is None else source.shape[0]
    save_all = save and not recompute
    return (
        tokens.new_empty(num_tokens, w_out.shape[1]),
        tokens.new_empty(num_rows, w_in.shape[1]) if save else tokens.new_empty(0),
        tokens.new_empty(num_rows, w_out.shape[2]) if save_all else tokens.new_empty(0),
        tokens.new_empty(num_rows, w_out.shape[1]) if save_all and source is not None else tokens.new_empty(0),
    )


@experts_backward_op.register_fake
def _(grad: Tensor, *others: Any) -> tuple[Tensor, ...]:
    _h, _a, _y, tokens, _source, gates, _by_token, _offsets, _counts, *weights = others[:13]
    inputs, needed = (tokens, gates, *weights), others[-1]
    return tuple(torch.empty_like(x) if need else grad.new_empty(0) for x, need in zip(inputs, needed, strict=True))


def apply_experts(*inputs: Any) -> Tensor:
    """Takes the arguments of ``compute_experts`` and returns its first result, with a gradient if one is needed.

    If neither a gradient nor a compiler needs the operator, this calls the plain function: for the few rows of a
    decoding step, dispatching an operator takes as long as the products.
    """
    tokens, save = inputs[0], inputs[-1]
    if save or torch.compiler.is_compiling() or type(tokens) is not Tensor or tokens.is_meta:
        return ExpertsFunction.apply(*inputs)
    return compute_experts(*inputs)[0]


class ExpertsFunction(torch.autograd.Function):
    """The two operators as a differentiable function; ``register_autograd`` would add more overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Takes the arguments of ``compute_experts`` and returns its first result."""
        *tensors, dropout, activation, recompute, save = inputs
        output, *kept = experts_op(*inputs)
        if save:
            ctx.save_for_backward(*kept, *tensors)
            ctx.settings = (dropout, activation, recompute)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns one gradient for each argument; None where none is needed."""
        needs = ctx.needs_input_grad
        needed = [needs[0], needs[2], *needs[6:10]]  # tokens, gates, weights and biases
        results = experts_backward_op(grads[0], *ctx.saved_tensors, *ctx.settings, needed)
        d_tokens, d_gates, *d_weights = (r if need else None for r, need in zip(results, needed, strict=True))
        return d_tokens, None, d_gates, None, None, None, *d_weights, None, None, None, None, None


def _pairs(
    source: Tensor | None, gates: Tensor | None, by_token: Tensor | None, offsets: Tensor | None
) -> Pairs | None:
    """Puts the operator's separate tensors together; operators cannot take a ``Pairs``."""
    if source is None or gates is None or by_token is None or offsets is None:
        return None
    return Pairs(source, gates, by_token, offsets)


def _spread(biases: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Repeats each expert's biases [E, Q] for its rows: [R, Q] in the rows' type. Does not wait for the device."""
    return biases.to(rows.dtype).repeat_interleave(counts, dim=0, output_size=len(rows))


def _activate(h: Tensor, mask: Tensor | None, dropout: float, activation: str, width: int) -> Tensor:
    """Computes the hidden units [R, F] from h, with dropout if there is a mask."""
    a = ACTIVATIONS[activation].forward(h, h.new_empty(len(h), width))
    return a if mask is None else a.mul_(mask).mul_(1 / (1 - dropout))


def _dot(left: Tensor, right: Tensor, pairs: Pairs) -> Tensor:
    """Returns the inner products of corresponding rows [R], in the gates' precision."""
    return torch.linalg.vecdot(left.to(pairs.gates.dtype), right.to(pairs.gates.dtype))
