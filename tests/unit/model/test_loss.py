"""The loss: its value, how it splits over rows, micro-batches and recomputation, and saving."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForImageTextToText

from m6.errors import UserError
from m6.model import M6ForConditionalGeneration
from m6.model.outputs import Head, losses_of_logits
from moe import MoELayer


def test_loss_and_target_losses_in_row_major_order(tiny_model, pack, samples):
    model = tiny_model(moe={"num_experts": 4, "num_prototypes": 2, "aux_loss_weight": 0.3})
    batch = pack(model.config, [samples[:2], samples[2:]])
    output = model(**batch)
    expected, weighted, weights = [], 0.0, 0.0
    for b in range(2):
        for s in range(1, batch["labels"].shape[1]):
            label = batch["labels"][b, s]
            if label != -100:
                expected.append(F.cross_entropy(output.logits[b, s - 1], label))
                weighted += batch["loss_weights"][b, s] * expected[-1]
                weights += batch["loss_weights"][b, s]
    torch.testing.assert_close(output.target_losses, torch.stack(expected), atol=1e-12, rtol=0)
    assert len(expected) == 3 + 4 + 2 + 5
    assert output.aux_loss > 0
    # In evaluation the loss is that of the targets alone, whose exponential is a perplexity.
    torch.testing.assert_close(output.loss, weighted / weights, atol=1e-12, rtol=0)
    assert len(output.router_stats) == 1
    assert output.router_stats[0].num_tokens == (batch["sample_ids"] != 0).sum()


def test_no_logits_gives_the_same_loss(tiny_model, pack, samples):
    model = tiny_model(codes_per_place=2)
    first = model.config.first_code_id
    codes = replace(samples[0], target=[9, first + 7, first, first + 3, first + 4, 9])
    batch = pack(model.config, [[*samples, codes]])
    whole, gathered = model(**batch), model(**batch, return_logits=False)
    assert gathered.logits is None
    torch.testing.assert_close(gathered.loss, whole.loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(gathered.target_losses, whole.target_losses, atol=1e-12, rtol=0)


def test_cross_entropy_is_fp32_in_a_bf16_model(tiny_model, pack, samples):
    model = tiny_model().bfloat16()
    output = model(**pack(model.config, [samples]), return_logits=False)
    assert output.target_losses.dtype == output.aux_loss.dtype == torch.float32


@pytest.mark.parametrize("rows", [0, 1, 64, 150])
def test_losses_of_many_rows(rows, tiny_config):
    """Row by row, with a gradient that weighs them, in 16 bits: the sum is in fp32, each gradient is rounded once."""
    config = tiny_config()
    size = config.first_code_id
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(rows, config.vocab_size, generator=generator)).bfloat16().requires_grad_()
    targets, weights = torch.randint(size, (rows,), generator=generator), torch.rand(rows, generator=generator)
    losses = losses_of_logits(logits, targets, config)
    (gradient,) = torch.autograd.grad(losses, logits, weights)
    likely = logits.detach().double().softmax(-1)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), -likely.gather(1, targets[:, None])[:, 0].log(), atol=1e-5, rtol=0)
    expected = weights.double()[:, None] * (likely - F.one_hot(targets, config.vocab_size))
    torch.testing.assert_close(gradient.double(), expected, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize(("books", "kinds"), [(1, "both"), (2, "both"), (4, "both"), (2, "codes"), (2, "one code")])
def test_a_code_competes_with_its_own_codebook(books, kinds, tiny_config):
    """Against logits with -inf at all other tokens; text competes with everything."""
    config = tiny_config(image_vocab_size=32, codes_per_place=books)
    assert config.codebook_size == 32 // books
    first, generator = config.first_code_id, torch.Generator().manual_seed(books)
    states = torch.randn(150, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(config.vocab_size, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0 if kinds == "both" else first, config.vocab_size, (150,), generator=generator)
    if kinds == "one code":
        targets[:] = first + 17
    tokens = torch.arange(config.vocab_size)
    book = (targets - first) // config.codebook_size
    rivals = (tokens - first) // config.codebook_size == book[:, None]
    rivals |= targets[:, None] < first
    expected = F.cross_entropy((states @ table.T).masked_fill(~rivals, -torch.inf), targets, reduction="none")
    weights = torch.rand(150, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, (states, table), weights, retain_graph=True)
    for losses in (
        Head().losses(states, table, targets, config),
        losses_of_logits(F.linear(states, table), targets, config),
    ):
        torch.testing.assert_close(losses, expected, atol=1e-12, rtol=0)
        found = torch.autograd.grad(losses, (states, table), weights, retain_graph=True)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_packing_equals_separate_samples(tiny_model, pack, samples):
    model = tiny_model()
    packed = model(**pack(model.config, [samples[:3], samples[3:]], left=1))
    separate = [model(**pack(model.config, [[sample]])).target_losses for sample in samples]
    torch.testing.assert_close(packed.target_losses, torch.cat(separate), atol=1e-6, rtol=0)
    torch.testing.assert_close(packed.target_losses.sum(), sum(s.sum() for s in separate), atol=1e-6, rtol=0)


# Every auxiliary loss, and a balance that does not depend on the split: see MoEConfig.balance_scope.
ROUTERS = {
    "num_experts": 8,
    "num_prototypes": 2,
    "top_k": 2,
    "aux_loss_weight": 0.3,
    "z_loss_weight": 0.1,
    "balance_scope": "sequence",
}


def slow_loss(model, pack, rows, items):
    """The loss of rows of samples, computed row by row and token by token from the logits of head and routers."""
    settings, loss = model.config.moe_config(), 0.0
    for row in rows:
        batch = pack(model.config, [row])
        logits: list[torch.Tensor] = []
        routers = [layer.ffn.router for layer in model.model.layers if isinstance(layer.ffn, MoELayer)]
        hooks = [
            router.register_forward_hook(lambda _, __, output, found=logits: found.append(output)) for router in routers
        ]
        scores = model(**batch).logits[0]
        for hook in hooks:
            hook.remove()
        assert len(logits) == 2
        labels, weights = batch["labels"][0], batch["loss_weights"][0].double()
        labelled = [place for place in range(1, len(labels)) if labels[place] != -100]
        for place in labelled:
            loss = loss - weights[place] * scores[place - 1].log_softmax(-1)[labels[place]] / items
        share = sum(weights[place] for place in labelled) / items
        samples = batch["sample_ids"][0]
        samples = samples[samples != 0]
        for of_layer in logits:
            assert len(of_layer) == len(samples)
            for token, sample in enumerate(samples):
                for z in range(settings.num_prototypes):
                    neighbours = of_layer[samples == sample, z]
                    choices = neighbours.topk(settings.top_k).indices.flatten()
                    shares = choices.bincount(minlength=settings.experts_per_prototype).double() / len(choices)
                    own = of_layer[token, z]
                    balance = settings.experts_per_prototype * (shares * own.softmax(-1)).sum()
                    aux = settings.aux_loss_weight * balance + settings.z_loss_weight * own.logsumexp(-1) ** 2
                    loss = loss + share * aux / len(samples) / settings.num_prototypes
    return loss


def test_loss_and_gradients_do_not_depend_on_the_split(tiny_model, pack, samples):
    """Of rows of unequal length, all auxiliary losses included: 1e-10 in float64, about 1e5 rounding errors."""
    model = tiny_model(moe=ROUTERS, moe_layer_frequency=1).train()
    rows = [samples[:1], samples[1:3], samples[3:], samples[:2]]
    items = pack(model.config, rows)["loss_weights"].sum().double()
    expected = slow_loss(model, pack, rows, items)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(expected, parameters)
    for split in ([rows], [rows[:1], rows[1:]], [[row] for row in rows], [rows[2:], rows[:2]]):
        batches = [pack(model.config, part, left=len(split) % 3) for part in split]
        loss = sum(model(**batch, num_items_in_batch=items, return_logits=False).loss for batch in batches)
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(torch.autograd.grad(loss, parameters), gradients, atol=1e-10, rtol=0)
    whole = model(**pack(model.config, rows)).loss
    torch.testing.assert_close(whole, expected, atol=1e-10, rtol=0)
    assert whole > model.eval()(**pack(model.config, rows)).loss + 0.3  # a balanced layer adds 0.3 for its balance


def test_gradient_checkpointing_changes_no_gradient(tiny_model, pack, samples):
    model = tiny_model(hidden_dropout=0.1, attention_dropout=0.1).train()
    batch = pack(model.config, [samples])
    results = []
    for enable in (False, True):
        if enable:
            model.activation_checkpointing_enable()
            assert all(layer.gradient_checkpointing for layer in model.model.layers)
        model.zero_grad()
        torch.manual_seed(0)
        output = model(**batch, return_logits=False)
        output.loss.backward()
        results.append((output.loss, [parameter.grad.clone() for parameter in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for plain, recomputed in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(plain, recomputed)
    output.router_stats[0].expert_counts.sum()  # the statistics outlive the recomputation


def test_packed_rows_need_token_types(tiny_model, pack, samples):
    model = tiny_model()
    batch = pack(model.config, [samples])
    with pytest.raises(UserError, match="token_type_ids"):
        model(**{**batch, "token_type_ids": None})


def test_unpacked_rows_need_ids_alone(tiny_model, pack, samples):
    model = tiny_model()
    batch = pack(model.config, [[sample] for sample in samples], left=2)
    bare = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"], labels=batch["labels"])
    torch.testing.assert_close(bare.target_losses, model(**batch).target_losses, atol=1e-12, rtol=0)


def test_save_and_load(tiny_model, pack, samples, tmp_path):
    model = tiny_model().float()
    # One step first: the input and output sides of the shared embedding must stay one tensor.
    batch = pack(model.config, [samples])
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    before = model(**batch)
    model.save_pretrained(tmp_path)
    names = model.state_dict().keys()
    vocabulary = [name for name in names if model.state_dict()[name].shape[:1] == (model.config.vocab_size,)]
    assert vocabulary == ["model.embeddings.tokens.weight"]
    for load in (M6ForConditionalGeneration, AutoModelForImageTextToText):
        loaded = load.from_pretrained(tmp_path).eval()
        assert type(loaded) is M6ForConditionalGeneration
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        assert torch.equal(loaded(**batch).logits, before.logits)
        assert loaded.generation_config.eos_token_id == model.config.eos_token_id
    base = AutoModel.from_pretrained(tmp_path).eval()
    hidden = base(**{name: batch[name] for name in batch if name not in ("labels", "loss_weights")}).last_hidden_state
    assert torch.equal(F.linear(hidden, base.embeddings.tokens.weight), before.logits)
