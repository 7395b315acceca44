import io

import numpy as np
import pytest
import torch
from PIL import Image

from m6.errors import UserError
from m6.generation.drawing import Repaint
from m6.tokenizers import M6ImageProcessor, M6Processor, load_text_tokenizer
from m6.tokenizers.pictures import decode_picture, pixel_values
from tests.fixtures.tiny_data import build_tiny_tokenizer

SIDE = 16


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    tokenizer = load_text_tokenizer(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return M6Processor(M6ImageProcessor(size={"height": SIDE, "width": SIDE}), tokenizer, num_patches=4)


def picture(mode="RGB", size=(SIDE, SIDE), seed=0):
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(values.squeeze(-1) if channels == 1 else values, mode)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_prompts_are_padded_on_the_left(processor):
    t = processor.tokenizer
    short, long = t.encode_ids("熊猫"), t.encode_ids("今天老师在公园里")
    batch = processor(images=[picture(), None], text=["熊猫", "今天老师在公园里"], target_prefix="一个")
    prefix = t.encode_ids("一个")
    rows = [
        [t.image_token_id] * 4 + short + [t.bos_token_id] + prefix,
        [*long, t.bos_token_id, *prefix],
    ]
    types = [
        [0] * 4 + [1] * len(short) + [2] * (1 + len(prefix)),
        [1] * len(long) + [2] * (1 + len(prefix)),
    ]
    length = max(map(len, rows))
    for index, (row, kinds) in enumerate(zip(rows, types, strict=True)):
        padding = length - len(row)
        assert batch["input_ids"][index].tolist() == [t.pad_token_id] * padding + row
        assert batch["attention_mask"][index].tolist() == [0] * padding + [1] * len(row)
        assert batch["token_type_ids"][index].tolist() == [0] * padding + kinds
    assert batch["input_ids"].dtype == batch["token_type_ids"].dtype == torch.int64
    assert batch["pixel_values"].shape == (1, 3, SIDE, SIDE)
    assert batch["pixel_values"].dtype == torch.float32


def test_targets_are_learned_with_their_end(processor):
    t = processor.tokenizer
    texts, targets = ["熊猫", "今天老师在公园里"], ["黑白的", "他在看书"]
    batch = processor(images=[picture(), None], text=texts, targets=targets)
    learned = [[*t.encode_ids(target), t.eos_token_id] for target in targets]
    prompts = [[*[t.image_token_id] * 4, *t.encode_ids(texts[0])], t.encode_ids(texts[1])]
    rows = [[*prompt, t.bos_token_id, *ids] for prompt, ids in zip(prompts, learned, strict=True)]
    length = max(map(len, rows))
    for index, (row, ids) in enumerate(zip(rows, learned, strict=True)):
        assert batch["input_ids"][index].tolist() == [t.pad_token_id] * (length - len(row)) + row
        assert batch["token_type_ids"][index].tolist()[-len(ids) - 1 :] == [2] * (len(ids) + 1)
        assert batch["labels"][index].tolist() == [-100] * (length - len(ids)) + ids
    assert "labels" not in processor(text=texts)
    nested = processor(text=texts, targets=targets, text_kwargs={"max_length": 8, "truncation": True})
    assert nested["labels"].shape == nested["input_ids"].shape
    assert nested["input_ids"].shape[1] <= 8


def test_the_arguments_of_transformers(processor):
    texts = ["熊猫", "今天老师在公园里"]
    default = processor(images=[picture(), picture()], text=texts)
    explicit = processor(images=[picture(), picture()], text=texts, return_tensors="pt", padding=True)
    assert all(torch.equal(default[name], explicit[name]) for name in default)
    arrays = processor(text=texts, return_tensors="np", padding="max_length", max_length=40)
    assert arrays["input_ids"].shape == (2, 40)
    assert (arrays["attention_mask"].sum(1) == [len(processor.tokenizer.encode_ids(text)) + 1 for text in texts]).all()
    lists = processor(text=texts, return_tensors=None, padding=False)
    assert lists["input_ids"] == [[*processor.tokenizer.encode_ids(t), processor.tokenizer.bos_token_id] for t in texts]
    cut = processor(images=picture(), text=texts[1], truncation=True, max_length=7, target_prefix="一个")
    assert cut["input_ids"].shape == (1, 7)
    assert cut["token_type_ids"][0].tolist()[:4] == [0] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": False}, "make no tensor; pass padding=True"),
        ({"padding": "max_length"}, "needs a max_length of at least"),
        ({"padding": "left"}, "padding 'left': expected True"),
        ({"truncation": True, "max_length": 0}, "leaves no room"),
        ({"targets": ["看"] * 3}, "3 targets do not match 2 texts or images"),
        ({"targets": "书", "target_prefix": "看"}, "target_prefix is for generation, targets are for training"),
        ({"truncation": True}, "truncation needs a max_length"),
    ],
)
def test_lengths_that_do_not_fit(processor, options, message):
    with pytest.raises(ValueError, match=message):
        processor(text=["熊猫", "今天老师在公园里"], **options)


def test_picture_alone_and_text_alone(processor):
    t = processor.tokenizer
    assert processor(images=picture())["input_ids"].tolist() == [[t.image_token_id] * 4 + [t.bos_token_id]]
    text = processor(text="熊猫", target_prefix=[t.boi_token_id])
    assert text["input_ids"].tolist() == [[*t.encode_ids("熊猫"), t.bos_token_id, t.boi_token_id]]
    assert "pixel_values" not in text


def test_batches_of_pictures_in_each_form(processor):
    pair = [picture(), picture()]
    plain = processor(images=pair)
    array = np.stack([np.asarray(each.convert("RGB")) for each in pair])
    for batch in ([[each] for each in pair], array, torch.from_numpy(array)):
        assert torch.equal(processor(images=batch)["pixel_values"], plain["pixel_values"])
    assert len(processor(images=[[picture()], []], text=["一", "二"])["pixel_values"]) == 1


def test_special_tokens_cannot_be_written_in_a_prompt(processor):
    ids = processor(text="<eos><image>")["input_ids"][0].tolist()
    assert max(ids[:-1]) < processor.tokenizer.text_vocab_size


def test_wrong_prompts(processor):
    with pytest.raises(ValueError, match="needs images or text"):
        processor()
    with pytest.raises(ValueError, match="1 images do not match 2 texts"):
        processor(images=picture(), text=["一", "二"])
    with pytest.raises(ValueError, match="a prompt has at most one image, found 2"):
        processor(images=[[picture(), picture()]], text=["一"])
    for empty in ({"text": []}, {"images": []}):
        with pytest.raises(ValueError, match="is an empty list"):
            processor(**empty)


@pytest.mark.parametrize("images", [None, "a picture"])
def test_unknown_arguments(processor, images):
    given = {"text": "熊猫", "images": images and picture()}
    with pytest.raises(ValueError, match=r'max_lenght: .* no such argument; did you mean "max_length"'):
        processor(**given, max_lenght=3)
    with pytest.raises(ValueError, match="padding_side: M6Processor knows no such argument"):
        processor(**given, text_kwargs={"padding_side": "right"})
    processor(**given, do_resize=True)
    with pytest.raises(ValueError, match="do_rescale is given both by itself and in images_kwargs"):
        processor(**given, do_rescale=False, images_kwargs={"do_rescale": True})


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
@pytest.mark.parametrize("size", [(SIDE, SIDE), (40, 40), (30, 12)])
def test_training_and_serving_see_the_same_picture(processor, mode, size):
    image = picture(mode, size)
    served = processor.image_processor(image, return_tensors="pt")["pixel_values"]
    trained = pixel_values([decode_picture(encoded(image), SIDE)], SIDE)
    # Both scale 8 bits to [-1, 1] in fp32, by other operations.
    torch.testing.assert_close(served, trained, rtol=0, atol=1e-6)
    assert trained.abs().max() <= 1


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.float32])
def test_pictures_that_are_scaled_already(processor, kind):
    levels = np.asarray(picture())
    floats = torch.tensor(levels, dtype=kind) / 255 if kind == torch.float32 else (levels / 255).astype(kind)
    expected = processor(images=picture())["pixel_values"]
    assert torch.equal(processor(images=floats, do_rescale=False)["pixel_values"], expected)
    # Only 0 and 1: these are not levels of 255.
    white = np.ones((SIDE, SIDE, 3), np.float32)
    assert (processor(images=white, do_rescale=False)["pixel_values"] == 1).all()
    for wrong, found in ((picture(), "uint8"), (levels, "uint8"), (levels.astype(np.float32), "float32 from 0.0")):
        with pytest.raises(UserError, match=rf"do_rescale=False .* floats in \[0, 1\], found {found}"):
            processor(images=wrong, do_rescale=False)


def test_the_order_of_channels_can_be_given(processor):
    """Of three rows, an array of channels last looks like one of channels first."""
    image = picture(size=(3, 3))
    array = np.asarray(image)
    expected = processor(images=image)["pixel_values"]
    for given, order in ((array, "channels_last"), (np.moveaxis(array, -1, 0), "channels_first")):
        assert torch.equal(processor(images=given, input_data_format=order)["pixel_values"], expected)


def test_transparency_and_missing_sides_are_white():
    half = Image.new("RGBA", (SIDE, SIDE), (255, 0, 0, 255))
    half.paste((0, 0, 0, 0), (0, 0, SIDE, SIDE // 2))
    values = decode_picture(encoded(half), SIDE)
    assert (values[: SIDE // 2] == 255).all()
    assert (values[SIDE // 2 :] == [255, 0, 0]).all()
    wide = decode_picture(encoded(Image.new("RGB", (SIDE, SIDE // 2), (0, 0, 255))), SIDE)
    assert (wide[: SIDE // 4] == 255).all()
    assert (wide[SIDE // 4 : -SIDE // 4] == [0, 0, 255]).all()
    assert (wide[-SIDE // 4 :] == 255).all()


def test_grey_of_16_bits_keeps_its_levels(processor):
    levels = np.array([[0, 0x80FF], [257 * 40, 65_535]], np.uint16)
    image = Image.fromarray(levels)
    assert decode_picture(encoded(image), 2).tolist() == [[[0] * 3, [128] * 3], [[40] * 3, [255] * 3]]
    with pytest.raises(ValueError, match="a picture of mode F"):
        processor.image_processor(Image.new("F", (SIDE, SIDE)))


def test_rotated_photographs_stand_upright():
    image = Image.new("RGB", (SIDE, SIDE), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, SIDE, SIDE // 2))
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    values = decode_picture(encoded(image, exif=exif), SIDE)
    assert (values[0, 0] == [255, 0, 0]).all()
    assert (values[-1, 0] == [0, 0, 255]).all()


def test_damaged_exif_data_are_ignored(processor):
    """The header of EXIF data without any, which Pillow fails to read."""
    image = picture()
    damaged = encoded(image, exif=b"Exif\0\0II*\0")
    assert (decode_picture(damaged, SIDE) == np.asarray(image)).all()
    opened = Image.open(io.BytesIO(damaged))
    values = processor(images=opened)["pixel_values"]
    assert torch.equal(values, processor(images=image)["pixel_values"])
    assert Repaint(opened, (0, 0, SIDE, SIDE)).box == (0, 0, SIDE, SIDE)


def test_pixel_values_range_and_order():
    black, white = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    white[0, 1] = (0, 255, 255)
    values = pixel_values([black, white], 2)
    assert (values[0] == -1).all()
    assert values[1, :, 0, 1].tolist() == [-1, 1, 1]
    assert pixel_values([], 2).shape == (0, 3, 2, 2)


def test_save_and_load(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    loaded = M6Processor.from_pretrained(tmp_path)
    assert isinstance(loaded.image_processor, M6ImageProcessor)
    assert loaded.num_patches == 4
    assert loaded.tokenizer.fingerprint == processor.tokenizer.fingerprint
    first, second = (p(images=picture(size=(20, 30)), text="熊猫") for p in (processor, loaded))
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name])
