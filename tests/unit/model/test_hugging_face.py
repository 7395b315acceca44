"""What transformers' Trainer and PEFT do with a model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments

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
