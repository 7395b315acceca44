"""What transformers' Trainer and PEFT do with a model."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments

from m6.errors import UserError
from m6.model import M6ForConditionalGeneration
from m6.tokenizers import M6ImageProcessor, M6Processor, load_text_tokenizer
from tests.fixtures.tiny_data import build_tiny_tokenizer


def test_what_a_trainer_saves_can_be_loaded(tiny_model, tmp_path):
    """The trainer notes on every model's configuration whether it uses its cache."""
    model = tiny_model().float()
    row = {"input_ids": [model.config.bos_token_id, 4, 5], "labels": [-100, 4, 5]}
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=[row] * 2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = M6ForConditionalGeneration.from_pretrained(tmp_path / "saved")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_trainer_teaches_and_predicts(tiny_model, tmp_path):
    """With the batches of the processor. What is predicted are the logits alone, as metrics expect them."""
    tokenizer = load_text_tokenizer(build_tiny_tokenizer(tmp_path / "tokenizer"))
    model = tiny_model(text_vocab_size=tokenizer.text_vocab_size, image_vocab_size=tokenizer.image_vocab_size).float()
    side = model.config.image_size
    image_processor = M6ImageProcessor(size={"height": side, "width": side})
    processor = M6Processor(image_processor, tokenizer, model.config.num_patches)
    rows = [
        {"image": Image.new("RGB", (8, 8), color), "caption": text} for color, text in (("red", "红"), ("blue", "蓝色"))
    ]

    def collate(rows: list[dict]) -> dict:
        return processor(images=[row["image"] for row in rows], targets=[row["caption"] for row in rows])

    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=30,
        learning_rate=0.01,
        per_device_eval_batch_size=1,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate)
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows)["eval_loss"] < before / 2
    predicted, labels = trainer.predict(rows)[:2]
    assert predicted.shape == (*labels.shape, model.config.vocab_size)


LENGTHS = (2, 20, 2, 29, 2, 11, 2, 2)  # of the targets of a row
ROUTERS = {"num_experts": 4, "num_prototypes": 2, "aux_loss_weight": 0.3, "z_loss_weight": 0.1}


def rows_of(model: M6ForConditionalGeneration) -> list[dict[str, list[int]]]:
    """Rows with a source of two tokens, padded."""
    generator, rows = torch.Generator().manual_seed(0), []
    for length in LENGTHS:
        target = torch.randint(4, 40, (length,), generator=generator).tolist()
        ids, padding = [4, 5, model.config.bos_token_id, *target], max(LENGTHS) - length
        labels = [-100] * 3 + target + [-100] * padding
        ids += [model.config.pad_token_id] * padding
        rows.append({"input_ids": ids, "attention_mask": [1] * (3 + length) + [0] * padding, "labels": labels})
    return rows


class Gradients(TrainerCallback):
    """Keeps the gradients of the only step."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}


def trained(model: torch.nn.Module, micro_batch: int, folder: Path) -> dict[str, torch.Tensor]:
    """The gradients of one step of transformers' Trainer with all rows."""
    rows, gradients = rows_of(model), Gradients()
    arguments = TrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=len(rows) // micro_batch,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(copy.deepcopy(model), arguments, train_dataset=rows, callbacks=[gradients]).train()
    return gradients.found


@pytest.mark.parametrize("adapters", [False, True])
def test_gradients_of_a_trainer_do_not_depend_on_the_split(tiny_model, tmp_path, adapters):
    """All losses of routers included, in fp32: 1e-5 of the largest number of a gradient."""
    model = tiny_model(moe={**ROUTERS, "balance_scope": "sequence"}).float()
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    whole = trained(model, 8, tmp_path)
    assert adapters or whole["model.layers.1.ffn.router.weight"].abs().max() > 1e-3
    for micro_batch in (4, 2, 1):
        for name, gradient in trained(model, micro_batch, tmp_path).items():
            error = (gradient - whole[name]).abs().max()
            assert error <= 1e-5 * whole[name].abs().max(), (micro_batch, name, float(error))


def test_a_trainer_evaluates_the_targets_alone(tiny_model, tmp_path):
    """The exponential of the loss is a perplexity: routers add nothing to it."""
    model = tiny_model(moe=ROUTERS).float()
    rows = rows_of(model)
    arguments = TrainingArguments(str(tmp_path), per_device_eval_batch_size=8, report_to=[], use_cpu=True)
    found = Trainer(model.train(), arguments).evaluate(rows)["eval_loss"]
    inputs = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    logits, labels = model.double().eval()(**inputs).logits[:, :-1], inputs["labels"][:, 1:]
    expected = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_losses_that_the_trainer_computes_itself(tiny_model, tmp_path):
    """It shifts no labels for the smoothed loss, so that a model would learn to repeat what it reads."""
    model = tiny_model().float()
    options = {"max_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    smoothed = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, **options)
    with pytest.raises(UserError, match="label_smoothing_factor of the Trainer would teach each output the token that"):
        Trainer(model, smoothed, train_dataset=rows_of(model)).train()
    model.accepts_loss_kwargs = False
    arguments = TrainingArguments(str(tmp_path), **options)
    own = {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.square().mean()}
    Trainer(model, arguments, train_dataset=rows_of(model), **own).train()


def test_the_notes_of_a_quantised_model_can_be_loaded(tiny_config, tmp_path):
    config = tiny_config()
    config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path).quantization_config["load_in_8bit"]


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_adapters_of_peft_learn(tiny_model, task_type):
    model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", task_type=task_type))
    ids = torch.tensor([[model.config.bos_token_id, 4, 5]])
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients
    assert all("lora_" in name for name in gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())


def test_embeddings_instead_of_ids(tiny_model):
    model = tiny_model()
    for part in (model, model.model):
        with pytest.raises(UserError, match="inputs_embeds: pictures, types and positions go by input_ids"):
            part(input_ids=torch.tensor([[model.config.bos_token_id]]), inputs_embeds=torch.zeros(1, 1, 32))


def test_a_loss_of_some_logits(tiny_model):
    """Labels are at positions of the whole row; those of the last logits would be others."""
    model = tiny_model()
    ids = torch.tensor([[model.config.bos_token_id, 4, 5, 6]])
    for kept in (2, torch.tensor([1, 2])):
        with pytest.raises(UserError, match="logits_to_keep: the loss of labels needs all positions"):
            model(input_ids=ids, labels=ids, logits_to_keep=kept)
        assert model(input_ids=ids, logits_to_keep=kept).logits.shape[1] == 2
