"""Stages of a pipeline: together they are the model, with the same dropout and the same names."""

import copy

import torch

from m6.model import initialize_parameters
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.stages import ModelStage, keep_layers

MOE = {"num_experts": 4, "num_prototypes": 2, "router_jitter": 0.2}


def parts(model: M6ForConditionalGeneration, cut: list[range]) -> list[ModelStage]:
    """Each stage from a copy of the model that keeps nothing else."""
    table, found = model.model.embeddings.tokens.weight, []
    for layers in cut:
        kept = copy.deepcopy(model)
        keep_layers(kept, set(layers))
        assert {name for name, _ in kept.named_parameters()} < {name for name, _ in model.named_parameters()}
        found.append(ModelStage(kept, layers, table).train())
    return found


def test_stages_are_the_model(tiny_config):
    config = tiny_config(num_layers=4, moe=MOE, moe_layer_frequency=2, hidden_dropout=0.3, attention_dropout=0.2)
    model = M6ForConditionalGeneration(config).train()
    initialize_parameters(model, seed=0)
    ids = torch.randint(5, 40, (2, 12))
    samples = torch.ones_like(ids)
    samples[1, 9:] = 0
    inputs = {
        "input_ids": ids,
        "token_type_ids": torch.ones_like(ids) + (torch.arange(12) > 5),
        "position_ids": torch.arange(12).expand(2, 12),
        "sample_ids": samples,
        "pixel_values": torch.empty(0, 3, 16, 16),
    }
    labels = torch.where((torch.arange(12) > 6) & (samples > 0), ids, -100)
    whole = model(**inputs, labels=labels, return_logits=False, dropout_seed=7)
    for cut in ([range(1), range(1, 4)], [range(3), range(3, 4)], [range(2), range(2, 3), range(3, 4)]):
        hidden, aux, counts = None, 0.0, 0
        for stage in parts(model, cut):
            torch.rand(3)  # another stage of the same process
            hidden, output = stage(hidden, inputs, labels, 7)
            aux = aux + output.aux_loss
            counts = counts + torch.stack([layer.expert_counts for layer in output.router_stats])
        torch.testing.assert_close(output.target_losses, whole.target_losses, rtol=0, atol=0)
        torch.testing.assert_close(aux, whole.aux_loss)
        torch.testing.assert_close(counts, torch.stack([layer.expert_counts for layer in whole.router_stats]))
    other = model(**inputs, labels=labels, return_logits=False, dropout_seed=8)
    assert not torch.equal(other.target_losses, whole.target_losses)


def test_layers_draw_different_numbers(tiny_config):
    """Two layers with the same weights and the same input: only their dropout differs."""
    model = M6ForConditionalGeneration(tiny_config(num_layers=3, hidden_dropout=0.5)).train()
    initialize_parameters(model, seed=0)
    model.model.layers[2] = model.model.layers[1]
    types = torch.ones(1, 6, dtype=torch.int64)
    inputs = {"token_type_ids": types, "sample_ids": types}
    hidden, labels = torch.randn(1, 6, 32), torch.full((1, 6), -100)
    stages = [ModelStage(model, layers, None) for layers in (range(1, 2), range(2, 3))]
    stages[1].norm = None
    first, second = (stage(hidden, inputs, labels, 3)[0] for stage in stages)
    assert not torch.equal(first, second)
