"""Export of a checkpoint that was written in two uneven pieces, and loading it back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from m6.checkpoints.initial import ExportedWeights, open_initial_weights
from m6.checkpoints.loading import INDEX, WEIGHTS, load_run_model
from m6.data.objectives import OBJECTIVES
from m6.errors import StorageError, UserError
from m6.export import export_hf
from m6.model import M6ForConditionalGeneration
from m6.tokenizers.processor import M6Processor
from tests.fixtures.fabricated_run import change_state, run_document, write_run
from tests.fixtures.storage import lose
from tests.fixtures.tiny_data import build_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    return build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make_run(tmp_path, tokenizer_folder):
    """Writes a run with one complete checkpoint; returns its folder and the model that it holds."""

    def make(**model) -> tuple[Path, M6ForConditionalGeneration]:
        run = tmp_path / "run"
        return run, write_run(run, run_document(tmp_path / "data", tokenizer_folder, **model))

    return make


def assert_same_weights(model, reference, dtype=torch.float32):
    expected, found = reference.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name].cpu(), wanted), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_roundtrip(make_run, tmp_path, dtype):
    run, reference = make_run()
    out = tmp_path / "exports" / "hf"
    export_hf(run, out, dtype=dtype, max_shard_bytes=20_000)

    index = json.loads((out / INDEX).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    for file in files:
        tensors = load_file(file)
        assert {name for name, place in index["weight_map"].items() if place == file.name} == tensors.keys()
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
    assert not list(out.parent.glob(".*")), "the temporary folder is gone"
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "who may read the folder may read all of it"

    assert_same_weights(M6ForConditionalGeneration.from_pretrained(out), reference, getattr(torch, dtype))
    auto = AutoModelForImageTextToText.from_pretrained(out)
    assert_same_weights(auto, reference, getattr(torch, dtype))
    base = AutoModel.from_pretrained(out)
    assert_same_weights(base, reference.model, getattr(torch, dtype))
    assert AutoConfig.from_pretrained(out).moe == {"num_experts": 4, "num_prototypes": 2}


def test_answers_do_not_depend_on_their_neighbours(make_run, tmp_path):
    """The capacity of the training's validation makes the tokens of a batch compete for the experts."""
    run, _ = make_run()
    document = json.loads((run / "config.json").read_text())
    document["m6"]["moe"]["eval_capacity_factor"] = 0.5
    (run / "config.json").write_text(json.dumps(document))
    export_hf(run, tmp_path / "hf")
    exported = tmp_path / "hf" / "config.json"
    assert "eval_capacity_factor" not in exported.read_text()
    older = json.loads(exported.read_text())
    older["moe"]["eval_capacity_factor"] = 0.5
    exported.write_text(json.dumps(older))
    text = "今天早上，小明在公园里"
    for folder in (run, tmp_path / "hf"):
        model, processor = load_run_model(folder, torch.device("cpu"))
        alone, together = (model.model(**processor(text=[text] * n)).last_hidden_state for n in (1, 8))
        assert torch.allclose(together[7], alone[0], atol=1e-5), folder


def test_a_model_says_what_it_has_learned(make_run, tmp_path):
    run, _ = make_run()
    document = json.loads((run / "config.json").read_text())
    weights = {name: {"weight": float(name in ("text_continuation", "text_to_image"))} for name in OBJECTIVES}
    document["m6"]["objectives"] = weights
    document["m6"]["data"]["image_tokenizer"] = str(tmp_path)
    (run / "config.json").write_text(json.dumps(document))
    export_hf(run, tmp_path / "hf")
    for folder in (run, tmp_path / "hf"):
        model, _ = load_run_model(folder, torch.device("cpu"))
        assert model.decodings == ["left_to_right"]
        assert sorted(model.learned_objectives) == ["text_continuation", "text_to_image"]
    file = tmp_path / "hf" / "generation_config.json"
    older = json.loads(file.read_text())
    del older["learned_objectives"]
    file.write_text(json.dumps(older))
    assert load_run_model(tmp_path / "hf", torch.device("cpu"))[0].learned_objectives == []


def test_model_of_the_run_equals_that_of_the_export(make_run, tmp_path):
    run, reference = make_run()
    export_hf(run, tmp_path / "hf")
    text = "今天早上，小明在公园里"
    outputs = []
    for folder in (run, tmp_path / "hf"):
        model, processor = load_run_model(folder, torch.device("cpu"))
        assert isinstance(processor, M6Processor)
        assert not model.training
        assert_same_weights(model, reference)
        prompt = processor(text=[text], images=[torch.zeros(3, 50, 40, dtype=torch.uint8)])
        assert prompt["pixel_values"].shape == (1, 3, 32, 32)
        with torch.no_grad():
            outputs.append(model(**prompt).logits)
    with torch.no_grad():
        outputs.append(reference(**prompt).logits)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_integer_buffers_keep_their_type(make_run, tmp_path):
    run, reference = make_run(patch_encoder="resnet")
    export_hf(run, tmp_path / "hf", dtype="bfloat16")
    assert any(not tensor.is_floating_point() for tensor in reference.state_dict().values())
    assert_same_weights(M6ForConditionalGeneration.from_pretrained(tmp_path / "hf"), reference, torch.bfloat16)
    assert_same_weights(load_run_model(run, torch.device("cpu"))[0], reference)
    assert_same_weights(load_run_model(tmp_path / "hf", torch.device("cpu"))[0], reference, torch.bfloat16)
    assert ExportedWeights(tmp_path / "hf").shapes.keys() == {(name, "weight") for name in reference.state_dict()}


def test_a_damaged_shard_is_named_and_nothing_is_left(make_run, tmp_path):
    run, _ = make_run()
    shard = run / "checkpoints" / "step_00000100" / "rank_00001_000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"rank_00001_000\.safetensors: corrupt"):
        export_hf(run, tmp_path / "hf")
    with pytest.raises(UserError, match=r"rank_00001_000\.safetensors: corrupt"):
        load_run_model(run, torch.device("cpu"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_truncated_export_is_named(make_run, tmp_path):
    run, _ = make_run()
    export_hf(run, tmp_path / "hf")
    (shard,) = (tmp_path / "hf").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a complete exported model"):
        load_run_model(tmp_path / "hf", torch.device("cpu"))


def test_a_lost_file_server_is_not_an_incomplete_export(make_run, tmp_path, monkeypatch):
    run, _ = make_run()
    export_hf(run, tmp_path / "hf")
    lose(monkeypatch, "model.safetensors")
    with pytest.raises(StorageError, match="cannot be read"):
        open_initial_weights(tmp_path / "hf")


def test_pickled_weights_are_not_read(make_run, tmp_path):
    run, model = make_run()
    export_hf(run, tmp_path / "hf")
    (tmp_path / "hf" / WEIGHTS).unlink()
    torch.save(model.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"not a complete exported model: .*model\.safetensors"):
        load_run_model(tmp_path / "hf", torch.device("cpu"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def change_json(**values):
    def change(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def of_type(dtype):
    def change(file: Path) -> None:
        weights = load_file(file)
        name = max(weights, key=lambda name: weights[name].numel())
        save_file({**weights, name: weights[name].to(dtype)}, file, {"format": "pt"})

    return change


def drop_a_weight(file: Path) -> None:
    weights = load_file(file)
    del weights[min(weights)]
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("generation_config.json", Path.unlink, r"generation_config\.json: no such file"),
        ("generation_config.json", cut, r"generation_config\.json: not readable as JSON"),
        ("generation_config.json", change_json(code_decodings=["mask"]), 'unknown way to draw "mask"; did .*"masked"'),
        ("generation_config.json", change_json(code_decodings=None), 'unknown way to draw "None"'),
        ("generation_config.json", change_json(code_temperature="hot"), "code_temperature must be 0, or .*, found hot"),
        ("generation_config.json", change_json(code_temperature=-1), "code_temperature must be 0, or .*, found -1"),
        ("model.safetensors", drop_a_weight, r"hf: 1 missing weights for its config\.json, such as model\.embeddings"),
        *(
            ("model.safetensors", of_type(dtype), rf"model\..* is {name}, expected F32 or")
            for dtype, name in ((torch.int64, "I64"), (torch.bool, "BOOL"), (torch.complex64, "C64"))
        ),
        ("config.json", change_json(num_layers=1), "hf: .* unexpected weights"),
        *(("config.json", change_json(dtype=dtype), "not a complete exported model") for dtype in (5, "x", [])),
        ("generation_config.json", change_json(max_new_tokens="x"), "not a complete exported model"),
        ("generation_config.json", change_json(eos_token_id="x"), "eos_token_id is 'x', expected the id of a token"),
        ("generation_config.json", change_json(pad_token_id={}), "not a complete exported model"),
        ("tokenizer_config.json", change_json(added_tokens_decoder=5), r"tokenizer_config\.json is damaged"),
        ("config.json", change_json(hidden_size=48), "hf: .* mismatched weights"),
        ("tokenizer_config.json", change_json(image_vocab_size=9), r"image_vocab_size is 9, but 16 in config\.json"),
        ("tokenizer_config.json", cut, r"tokenizer_config\.json is damaged"),
        ("tokenizer_config.json", lambda file: file.write_text("[]"), r"tokenizer_config\.json is damaged"),
        ("sentencepiece.model", Path.unlink, r"sentencepiece\.model is missing"),
        ("sentencepiece.model", cut, r"sentencepiece\.model or .* is damaged"),
    ],
)
def test_a_damaged_export_is_refused(make_run, tmp_path, file, change, message):
    run, _ = make_run()
    export_hf(run, tmp_path / "hf")
    change(tmp_path / "hf" / file)
    with pytest.raises(UserError, match=message):
        load_run_model(tmp_path / "hf", torch.device("cpu"))


def test_an_existing_folder_is_not_overwritten(make_run, tmp_path):
    run, _ = make_run()
    out = tmp_path / "hf"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="not an empty folder"):
        export_hf(run, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    export_hf(run, out)
    assert (out / WEIGHTS).is_file()


def test_another_tokenizer_is_refused(make_run, tmp_path):
    run, _ = make_run()
    change_state(run, tokenizer="other")
    with pytest.raises(UserError, match="not the tokenizer"):
        export_hf(run, tmp_path / "hf")


def test_user_mistakes(make_run, tmp_path):
    run, _ = make_run()
    with pytest.raises(UserError, match='did you mean "float32"'):
        export_hf(run, tmp_path / "hf", dtype="float3")
    with pytest.raises(UserError, match="neither a run nor"):
        load_run_model(tmp_path / "missing", torch.device("cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="belongs neither"):
        load_run_model(tmp_path, torch.device("cpu"))
    (run / "checkpoints" / "step_00000100" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        export_hf(run, tmp_path / "hf")
