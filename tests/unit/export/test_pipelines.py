"""The contracts of transformers' pipelines, processors, tokenizers, on an export; docs/guides/model.md names each."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, Pipeline, pipeline

from m6.errors import UserError
from m6.export import export_hf
from m6.tokenizers import M6ImageProcessor, M6Processor, M6Tokenizer
from tests.fixtures.fabricated_run import write_run_and_data

RED = Image.new("RGB", (40, 30), "red")
SHORT, LONG = "今", "小明在公园里"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines")
    write_run_and_data(folder)
    export_hf(folder / "run", folder / "hf")
    return folder / "hf"


@pytest.fixture(scope="module")
def describe(exported) -> Pipeline:
    return pipeline("image-text-to-text", model=str(exported))


@pytest.fixture(scope="module")
def processor(exported) -> M6Processor:
    return AutoProcessor.from_pretrained(exported)


def test_image_text_to_text(describe, exported):
    (alone,) = describe(images=RED, text=SHORT, max_new_tokens=6)
    assert alone["input_text"] == SHORT
    assert alone["generated_text"].startswith(SHORT)
    (new,) = describe(images=RED, text=SHORT, max_new_tokens=6, return_full_text=False)
    assert SHORT + new["generated_text"] == alone["generated_text"]
    both = describe(images=[RED, RED], text=[SHORT, LONG], max_new_tokens=6)
    rows = [{"images": RED, "text": text} for text in (SHORT, LONG)]
    batched = [row for (row,) in describe((row for row in rows), max_new_tokens=6, batch_size=2)]
    assert both == batched == [describe(**row, max_new_tokens=6)[0] for row in rows]
    assert both[0] == alone
    assert len(describe(images=RED, text="", max_new_tokens=3, generate_kwargs={"num_beams": 2})) == 1
    assert describe(text=LONG, max_new_tokens=3)[0]["generated_text"].startswith(LONG), "without a picture"


def test_defaults_fit_the_positions(describe):
    assert describe.model.generation_config.max_new_tokens == describe.model.config.max_position_embeddings // 2
    (answer,) = describe(images=RED, text=SHORT)
    assert answer["generated_text"].startswith(SHORT)


def test_a_chat_is_refused_by_transformers(describe):
    with pytest.raises(ValueError, match="chat template"):
        describe(text=[{"role": "user", "content": [{"type": "text", "text": SHORT}]}])


def test_text_generation(exported):
    write = pipeline("text-generation", model=str(exported))
    options = {"max_new_tokens": 5, "do_sample": False}
    alone = [write(text, **options) for text in (SHORT, LONG)]
    assert all(rows[0]["generated_text"].startswith(text) for rows, text in zip(alone, (SHORT, LONG), strict=True))
    assert write([SHORT, LONG], batch_size=2, **options) == alone


def test_the_processor(processor, tmp_path):
    options = {"padding": "max_length", "max_length": 20, "return_tensors": "np"}
    plain = processor(images=[RED, None], text=[SHORT, LONG], **options)
    assert set(plain) == set(processor.model_input_names)
    assert plain["input_ids"].shape == (2, 20)
    assert plain["pixel_values"].shape == (1, 3, 32, 32)
    nested = processor(
        images=[RED, None],
        text=[SHORT, LONG],
        text_kwargs={"padding": "max_length", "max_length": 20},
        images_kwargs={"do_normalize": True},
        common_kwargs={"return_tensors": "np"},
    )
    assert all(np.array_equal(nested[name], plain[name]) for name in plain)
    dark = processor(images=RED, text=SHORT, images_kwargs={"do_normalize": False})
    assert dark["pixel_values"].min() == 0
    processor.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(again, M6Processor)
    assert again.to_json_string() == processor.to_json_string()
    assert torch.equal(again(images=RED, text=LONG)["input_ids"], processor(images=RED, text=LONG)["input_ids"])
    assert again.batch_decode(processor(text=LONG)["input_ids"], skip_special_tokens=True) == [LONG]


def test_the_image_processor(exported):
    processor = AutoImageProcessor.from_pretrained(exported)
    assert isinstance(processor, M6ImageProcessor)
    array = np.asarray(RED)
    pixels = [
        processor(each, return_tensors="pt")["pixel_values"]
        for each in (RED, array, torch.from_numpy(array.copy()).permute(2, 0, 1), [RED])
    ]
    assert all(torch.equal(each, pixels[0]) for each in pixels)


def test_the_tokenizer(exported, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert isinstance(tokenizer, M6Tokenizer)
    batch = tokenizer([SHORT, LONG], padding=True, return_tensors="pt")
    assert batch["input_ids"][0, 0] == tokenizer.pad_token_id, "on the left"
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == [SHORT, LONG]
    ids = tokenizer(LONG)["input_ids"]
    assert tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True) == [1] + [0] * (len(ids) - 1)
    assert tokenizer(LONG, truncation=True, max_length=3)["input_ids"] == ids[:3]
    limit = AutoConfig.from_pretrained(exported).max_position_embeddings
    assert len(tokenizer(LONG * 99, truncation=True)["input_ids"]) == limit
    assert tokenizer.convert_ids_to_tokens(tokenizer.convert_tokens_to_ids(tokenizer.tokenize(LONG))) == (
        tokenizer.tokenize(LONG)
    )
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="eos_token is '<sep>', expected '<eos>': the model has learned it"):
        AutoTokenizer.from_pretrained(exported, eos_token="<sep>")
    with pytest.raises(NotImplementedError, match="return_offsets_mapping"):
        tokenizer(LONG, return_offsets_mapping=True)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(LONG)["input_ids"] == ids
    assert again.get_vocab() == tokenizer.get_vocab()
