"""The prefix-LM mask against its rule written out, and what it means for the model's outputs."""

import pytest
import torch
from torch.nn import functional as F

from m6.model.attention import attend_by_products, prefix_lm_mask
from m6.model.embeddings import derive_position_ids, derive_token_type_ids


def brute_force_mask(types, samples):
    batch, length = types.shape
    mask = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for b in range(batch):
        for q in range(length):
            for k in range(length):
                same = samples[b, q] == samples[b, k] and samples[b, q] != 0
                mask[b, 0, q, k] = q == k or (same and (types[b, k] != 2 or k <= q))
    return mask


def test_mask_is_the_rule(tiny_config, pack, samples):
    batch = pack(tiny_config(), [samples[:2], samples[2:]], left=2)
    types, row_samples = batch["token_type_ids"], batch["sample_ids"]
    assert torch.equal(prefix_lm_mask(types, row_samples), brute_force_mask(types, row_samples))


def test_mask_of_a_continued_row_is_the_lower_part_of_the_whole(tiny_config, pack, samples):
    batch = pack(tiny_config(), [samples[:1], samples[3:]], left=1)
    types, row_samples = batch["token_type_ids"], batch["sample_ids"]
    whole = brute_force_mask(types, row_samples)
    length = types.shape[1]
    for past in range(length - 3, length):
        continued = prefix_lm_mask(types[:, past:], row_samples, past)
        assert torch.equal(continued, whole[:, :, past:])
        unwritten = torch.nn.functional.pad(row_samples, (0, 5), value=1)  # a static cache of 5 more places
        longer = prefix_lm_mask(types[:, past:], unwritten, torch.tensor(past))
        assert torch.equal(longer[..., :length], whole[:, :, past:])
        assert not longer[..., length:].any()


def logits_of(model, batch, **changes):
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_weights")}
    with torch.no_grad():
        return model(**{**inputs, **changes}).logits


@pytest.mark.parametrize("sparse", [False, True])
def test_no_target_sees_a_later_one(tiny_model, pack, samples, sparse):
    model = tiny_model() if sparse else tiny_model(moe=None)
    # A token that goes to another expert changes the shapes of the experts' products, and so their rounding.
    tolerance = 1e-12 if sparse else 0.0
    batch = pack(model.config, [samples[:1]])
    before = logits_of(model, batch)
    for position in range(batch["input_ids"].shape[1] - 3, batch["input_ids"].shape[1]):
        changed = batch["input_ids"].clone()
        changed[0, position] = 20
        after = logits_of(model, batch, input_ids=changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], atol=tolerance, rtol=0)
        assert not torch.allclose(after[:, position], before[:, position])


def test_prefix_sees_in_both_directions_and_never_the_target(tiny_model, pack, samples):
    model = tiny_model(moe=None)
    batch = pack(model.config, [samples[:1]])  # 4 patches, source at 4..6, target from 7
    before = logits_of(model, batch)
    last_source = batch["input_ids"].clone()
    last_source[0, 6] = 20
    after = logits_of(model, batch, input_ids=last_source)
    assert (after - before).abs().amax(dim=-1).min() > 1e-3  # all positions, the patches before it included
    target = batch["input_ids"].clone()
    target[0, 7:] = 20
    assert torch.equal(logits_of(model, batch, input_ids=target)[:, :7], before[:, :7])


def test_padding_never_matters(tiny_model, pack, samples):
    model = tiny_model(moe={"num_experts": 4, "eval_capacity_factor": 0.6, "min_capacity": 1}, moe_layer_frequency=1)
    plain = pack(model.config, [samples[:2]])
    padded = pack(model.config, [samples[:2]], length=40, left=3)
    length = plain["input_ids"].shape[1]
    filled = padded["input_ids"].masked_fill(padded["sample_ids"] == 0, 20)
    for ids in (padded["input_ids"], filled):
        logits = logits_of(model, padded, input_ids=ids)
        assert torch.isfinite(logits).all()
        # 1e-12: float64, sums of another length may round differently.
        torch.testing.assert_close(logits[:, 3 : 3 + length], logits_of(model, plain), atol=1e-12, rtol=0)


def test_derived_types_and_positions_are_those_of_the_collator(tiny_config, pack, samples):
    config = tiny_config()
    for sample in samples:
        batch = pack(config, [[sample]], length=24, left=2)
        ids, row_samples = batch["input_ids"], batch["sample_ids"]
        types = derive_token_type_ids(ids, row_samples != 0, config.image_token_id, config.bos_token_id)
        assert torch.equal(types, batch["token_type_ids"])
        assert torch.equal(derive_position_ids(types, row_samples), batch["position_ids"])
    ids = torch.tensor([[1, config.bos_token_id, 2, config.bos_token_id, 3], [1, 2, 3, 4, 5]])
    types = derive_token_type_ids(
        ids, torch.ones_like(ids, dtype=torch.bool), config.image_token_id, config.bos_token_id
    )
    assert types.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 1]]  # the last <bos> opens the target
    packed = pack(config, [samples])
    positions = derive_position_ids(packed["token_type_ids"], packed["sample_ids"])
    assert torch.equal(positions, packed["position_ids"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_16_bits_are_the_fused_attention(dtype):
    """Outputs and gradients against fp64. Weights of at most 1 are rounded to 8 (bf16) or 11 bits, sums of 12 values of
    size 1 by as much again."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 3, 12, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(2, 1, 12, 12, generator=generator) < 0.7
    mask |= torch.eye(12, dtype=torch.bool)
    grad = torch.randn(2, 3, 12, 8, generator=generator, dtype=torch.float64)
    results = []
    for kind, attend in (
        (torch.float64, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)),
        (dtype, lambda q, k, v: attend_by_products(q, k, v, mask, 0.0)),
    ):
        inputs = [tensor.to(kind, copy=True).requires_grad_() for tensor in exact]
        output = attend(*inputs)
        output.backward(grad.to(kind))
        results.append([output.detach(), *(tensor.grad for tensor in inputs)])
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.0125
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def test_dropout_of_16_bits_keeps_the_mean():
    torch.manual_seed(0)
    query, key, value = torch.zeros(3, 1, 1, 2000, 4, dtype=torch.bfloat16).unbind()
    value = value + 1
    dropped = attend_by_products(query, key, value, torch.ones(1, 1, 2000, 2000, dtype=torch.bool), 0.5)
    assert dropped.float().std() > 0
    assert float(dropped.float().mean()) == pytest.approx(1, abs=0.02)
