"""Low-rank adapters: what trains, what is saved, resuming, and the merged weights, at every ZeRO stage."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from m6.architecture.names import DOWN, is_adapter, plain_name
from m6.checkpoints.format import WEIGHT, CheckpointReader
from m6.checkpoints.initial import open_initial_weights
from m6.checkpoints.loading import load_run_model, newest_complete_checkpoint, open_newest_checkpoint
from m6.config.run import parse_config
from m6.errors import UserError
from m6.export import export_hf
from m6.model import num_parameters
from m6.runs.machine import check_machine
from tests.fixtures.fabricated_run import write_run
from tests.fixtures.tiny_run import tiny_document

pytest.importorskip("peft")
CPU = torch.device("cpu")
MODEL = {"m6__model__hidden_dropout": 0.0, "m6__model__moe_layer_frequency": 2}
LORA = {"rank": 2, "alpha": 8.0, "dropout": 0.1, "targets": ["attention", "dense", "experts"]}
STACKS = {f"model.layers.1.ffn.experts.{name}" for name in ("w_in", "w_out")}


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> Path:
    """A run with a checkpoint; its first layer is dense, its second one sparse."""
    run = folder / "pretrained_for_lora"
    write_run(run, tiny_document(folder, **MODEL))
    return run


@pytest.fixture
def make_finetuning(make_trainer, pretrained):
    def make(name: str = "run", **changes):
        return make_trainer(name, **{**MODEL, "m6__init": str(pretrained), "m6__lora": LORA, **changes})

    return make


def weights(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    return {name: reader.read(name, WEIGHT) for name in reader.names(WEIGHT)}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_only_adapters_train_and_their_sum_is_exported(make_finetuning, pretrained, tmp_path, zero_stage):
    trainer = make_finetuning(zero_optimization={"stage": zero_stage})
    assert trainer.train()
    before, after = (
        weights(newest_complete_checkpoint(pretrained)),
        weights(newest_complete_checkpoint(tmp_path / "run")),
    )
    adapters = {name for name in after if is_adapter(name)}
    modules = {name.removesuffix(DOWN[0]) for name in adapters if name.endswith(DOWN[0])}
    assert {name.removesuffix(DOWN[1]) for name in adapters if name.endswith(DOWN[1])} == STACKS
    assert modules == {
        *(f"model.layers.{layer}.attention.{part}" for layer in (0, 1) for part in ("qkv", "output")),
        *(f"model.layers.0.ffn.{part}" for part in ("input", "output")),
    }
    for name in after.keys() - adapters:
        assert torch.equal(after[name], before[plain_name(name)]), name
    moments = newest_complete_checkpoint(tmp_path / "run").names("exp_avg")
    assert set(moments) == adapters, "the optimizer knows nothing else"

    merged = weights(open_newest_checkpoint(tmp_path / "run"))
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if name in STACKS or (module in modules and name.endswith(".weight")):
            names = [
                f"{name}_lora_{part}" if name in STACKS else f"{module}.lora_{part}.default.weight" for part in "AB"
            ]
            down, up = (after[each] for each in names)
            assert up.abs().max() > 0
            torch.testing.assert_close(merged[name], weight + 4.0 * up @ down)
        else:
            assert torch.equal(merged[name], weight), name


def test_the_merged_model_computes_what_the_adapted_one_does(make_finetuning, tmp_path):
    trainer = make_finetuning()
    assert trainer.train()
    export_hf(tmp_path / "run", tmp_path / "hf")
    adapted = trainer.engine.module.eval()
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").eval()
    loaded, _ = load_run_model(tmp_path / "run", CPU)
    batch = trainer.data.micro_batch(0).model_inputs()
    with torch.no_grad():
        expected = adapted(**batch).logits
        torch.testing.assert_close(exported(**batch).logits, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(loaded(**batch).logits, exported(**batch).logits)
    assert "LoRA of attention, dense, experts, rank 2, alpha 8" in (tmp_path / "hf" / "README.md").read_text()
    assert set(loaded.state_dict()) == set(exported.state_dict())


def test_any_range_of_a_merged_weight_can_be_read(make_finetuning, tmp_path):
    assert make_finetuning().train()
    reader = open_initial_weights(tmp_path / "run")
    for name in ("model.layers.0.attention.qkv.weight", "model.layers.1.ffn.experts.w_in"):
        whole = torch.empty(torch.Size(reader.shapes[name, WEIGHT]).numel())
        reader.read_into(name, WEIGHT, 0, whole)
        for begin, end in ((0, 1), (31, 33), (40, 50), (100, 3000), (len(whole) - 1, len(whole))):
            part = torch.empty(end - begin)
            reader.read_into(name, WEIGHT, begin, part)
            torch.testing.assert_close(part, whole[begin:end])


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_resuming_is_going_through(make_finetuning, tmp_path, zero_stage):
    changes = {"zero_optimization": {"stage": zero_stage}, "m6__checkpoint__keep_last": 4}
    assert make_finetuning("straight", **changes).train()
    assert make_finetuning("stopped", **changes).train()
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_00000004")
    (tmp_path / "stopped" / "DONE").unlink()
    # Saved at one stage, resumed at another.
    assert make_finetuning("stopped", **{**changes, "zero_optimization": {"stage": 2 - zero_stage}}).train()
    ends = [newest_complete_checkpoint(tmp_path / name) for name in ("straight", "stopped")]
    assert [end.state["step"] for end in ends] == [4, 4]
    straight, stopped = map(weights, ends)
    assert straight.keys() == stopped.keys()
    for name, weight in straight.items():
        torch.testing.assert_close(stopped[name], weight, rtol=0, atol=1e-6)


def test_adapters_begin_as_the_model_without(make_finetuning, pretrained):
    trainer = make_finetuning()
    from m6.training.checkpointing import restore_weights

    restore_weights(trainer.engine, open_initial_weights(pretrained))
    batch = trainer.data.micro_batch(0).model_inputs()
    with torch.no_grad():
        expected = load_run_model(pretrained, CPU)[0](**batch).logits
        torch.testing.assert_close(trainer.engine.module.eval()(**batch).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("lora", "changes", "message"),
    [
        ({}, {"m6__init": None}, "use m6 finetune with --init"),
        ({"targets": ["experts"]}, {"m6__moe": None, "m6__model__moe_layer_frequency": 1}, 'is dense; use "dense"'),
        ({"targets": ["dense"]}, {"m6__model__moe_layer_frequency": 1}, 'all layers are experts; use "experts"'),
        ({"targets": ["attention"]}, {"m6__training__ep_size": 2}, 'needs "experts" among them'),
        ({"targets": ["attn"]}, {}, "'attention', 'dense' or 'experts'"),
        ({"rank": 0}, {}, r"m6\.lora\.rank"),
        ({}, {"m6__offload": {"device_budget_mib": 100}}, r"m6\.offload trains the experts, but m6\.lora"),
    ],
)
def test_mistakes(folder, lora, changes, message):
    with pytest.raises(UserError, match=message):
        parse_config(tiny_document(folder, **{**MODEL, "m6__init": "somewhere", "m6__lora": lora, **changes}))


def test_without_peft(folder, monkeypatch):
    config = parse_config(tiny_document(folder, **MODEL, m6__init="somewhere", m6__lora=LORA))
    check_machine(config)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(UserError, match="needs the package peft"):
        check_machine(config)


def test_a_run_says_what_it_trained(make_finetuning, tmp_path, capsys):
    trainer = make_finetuning()
    assert trainer.train()
    trained = sum(p.numel() for p in trainer.engine.module.parameters() if p.requires_grad)
    total = num_parameters(trainer.config.model)["total"]
    line = f"LoRA of attention, dense, experts: trains {trained:,} parameters beside {total:,} frozen ones; memory and"
    assert line in capsys.readouterr().err
    document = json.loads((tmp_path / "run" / "config.json").read_text())
    assert document["m6"]["lora"] == LORA
    assert newest_complete_checkpoint(tmp_path / "run").state["lora"] == LORA
