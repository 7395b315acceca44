"""A run's JSON: what is read from it, and that a mistake in it is told in one line before anything is written."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from m6.config.checks import check_world_size
from m6.config.run import RunConfig, load_config, parse_config
from m6.errors import UserError
from m6.validation import read_document
from tests.fixtures.command import user_error
from tests.fixtures.tiny_run import tiny_document, write_tiny_config

MISSING = object()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def changed(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The tiny run's JSON with dotted keys set, or removed."""
    document = tiny_document(folder)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = document
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is MISSING:
            del node[last]
        else:
            node[last] = value
    return document


def message(folder: Path, changes: dict[str, Any], *arguments: str, **environment: str) -> str:
    """What ``m6 pretrain`` says about the changed JSON."""
    config, run = folder / "changed.json", folder / "run"
    config.write_text(json.dumps(changed(folder, changes)), encoding="utf-8")
    text = user_error("pretrain", config, "--run-dir", run, *arguments, **environment)
    assert not run.exists()
    return text


UNKNOWN = {
    "train_batchsize": 'train_batchsize: unknown key; did you mean "train_batch_size"?',
    "zero_optimisation": 'did you mean "zero_optimization"?',
    "m6.modell": 'm6.modell: unknown key; did you mean "model"?',
    "m6.data[0]": 'm6.data[0]: unknown key; did you mean "data"?',
    "m6.float": 'm6.float: unknown key; did you mean "offload"?',
    "m6.model.hidden_dim": 'm6.model.hidden_dim: unknown key; did you mean "hidden_size"?',
    "m6.model.moe": "m6.model.moe: unknown key",
    "m6.model.vocab_size": 'did you mean "text_vocab_size"?',
    "m6.moe.num_expert": 'm6.moe.num_expert: unknown key; did you mean "num_experts"?',
    "m6.data.tokeniser": 'm6.data.tokeniser: unknown key; did you mean "tokenizer"?',
    "m6.objectives.captioning": 'm6.objectives.captioning: unknown key; did you mean "image_captioning"?',
    "m6.objectives.text_denoising.mask_rate": 'text_denoising.mask_rate: unknown key; did you mean "mask_ratio"?',
    "m6.objectives.language_modelling.mask_ratio": "language_modelling.mask_ratio: unknown key; valid: weight",
    "m6.training.steps": "m6.training.steps: unknown key",
    "m6.schedule.warmup": 'm6.schedule.warmup: unknown key; did you mean "warmup_steps"?',
    "m6.evaluation.intervall_steps": 'did you mean "interval_steps"?',
    "m6.checkpoint.keep": 'm6.checkpoint.keep: unknown key; did you mean "keep_last"?',
    "m6.logging.wandb_projekt": 'did you mean "wandb_project"?',
    "optimizer.parms": 'optimizer.parms: unknown key; did you mean "params"?',
    "optimizer.legacy_fusion": "optimizer.legacy_fusion: unknown key",
    "optimizer.params.learning_rate": "optimizer.params.learning_rate: unknown key",
    "optimizer.params.clipping_threshold": "optimizer.params.clipping_threshold: unknown key",
    "torch_autocast": "torch_autocast.enabled: missing",
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(folder: Path, key: str):
    assert UNKNOWN[key] in message(folder, {key: {}})


WRONG_TYPES = [
    ("train_batch_size", "8"),
    ("train_batch_size", 0),
    ("train_batch_size", True),
    ("train_batch_size", 8.0),
    ("train_batch_size", None),
    ("train_micro_batch_size_per_gpu", -2),
    ("train_micro_batch_size_per_gpu", "auto"),
    ("gradient_accumulation_steps", "auto"),
    ("gradient_accumulation_steps", 0),
    ("gradient_clipping", "1.0"),
    ("gradient_clipping", -1.0),
    ("gradient_clipping", True),
    ("gradient_clipping", None),
    ("optimizer", "AdamW"),
    ("optimizer.type", 3),
    ("optimizer.params", []),
    ("optimizer.params.lr", "1e-3"),
    ("optimizer.params.lr", True),
    ("optimizer.params.lr", 0),
    ("optimizer.params.lr", -1e-3),
    ("optimizer.params.weight_decay", "0.01"),
    ("optimizer.params.weight_decay", -0.01),
    ("optimizer.params.betas", 0.9),
    ("optimizer.params.betas", [0.9, 1.5]),
    ("optimizer.params.eps", 0),
    ("steps_per_print", "10"),
    ("wall_clock_breakdown", "yes"),
    ("torch_autocast", None),
    ("aio", None),
    ("communication_data_type", "bf8"),
    ("fp16", True),
    ("bf16", "on"),
    ("bf16.enabled", [1]),
    ("zero_optimization", 2),
    ("zero_optimization.stage", "2"),
    ("zero_optimization.stage", True),
    ("zero_optimization.stage", 4),
    ("m6", []),
    ("m6.model", []),
    ("m6.model.hidden_size", "32"),
    ("m6.model.hidden_size", True),
    ("m6.model.num_layers", 2.0),
    ("m6.model.num_layers", 0),
    ("m6.model.hidden_dropout", "0.1"),
    ("m6.model.hidden_dropout", 1.0),
    ("m6.model.patch_encoder", 3),
    ("m6.moe", 4),
    ("m6.moe.num_experts", "4"),
    ("m6.moe.num_experts", True),
    ("m6.moe.num_experts", -4),
    ("m6.moe.capacity_factor", "1.25"),
    ("m6.moe.activation", "swish"),
    ("m6.data.path", 7),
    ("m6.data.sources", ["tiny_text"]),
    ("m6.data.sources", {"tiny_text": "one"}),
    ("m6.data.sequence_length", "64"),
    ("m6.data.packing", 1),
    ("m6.data.num_workers", -1),
    ("m6.objectives", None),
    ("m6.objectives.text_denoising.weight", "1"),
    ("m6.objectives.text_denoising.weight", -1),
    ("m6.objectives.text_denoising.mask_ratio", 1),
    ("m6.training.total_steps", "4"),
    ("m6.training.total_steps", 4.5),
    ("m6.training.seed", -1),
    ("m6.training.ep_size", 0),
    ("m6.training.activation_checkpointing", "false"),
    ("m6.schedule.decay", "linear"),
    ("m6.schedule.final_lr_ratio", 1.5),
    ("m6.checkpoint.keep_last", 0),
    ("m6.checkpoint.async_save", 0),
    ("m6.logging.wandb", True),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG_TYPES)
def test_a_wrong_type_or_range_names_the_key_and_the_value(folder: Path, key: str, value: Any):
    text = message(folder, {key: value})
    assert key.split(".")[-1] in text
    while isinstance(value, dict | list) and value and repr(value) not in text:  # the message may name the place inside
        *_, value = value.values() if isinstance(value, dict) else value
    assert repr(value) in text


MISSING_KEYS = [
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer", "optimizer.type",
    "optimizer.params", "optimizer.params.lr", "m6", "m6.moe.num_experts", "m6.data", "m6.data.path",
    "m6.data.tokenizer", "m6.objectives", "m6.training", "m6.training.total_steps",
]  # fmt: skip


@pytest.mark.parametrize("key", MISSING_KEYS)
def test_a_missing_key_is_named(folder: Path, key: str):
    text = message(folder, {key: MISSING})
    assert key in text
    assert "missing" in text


FITTING = [
    ({"train_batch_size": 7}, {}, r"train_batch_size 7: .*_per_gpu 2; try .*_per_gpu 1, or train_batch_size 8"),
    ({}, {"WORLD_SIZE": "5"}, r"train_batch_size 8: .*4 micro-batches of 2, fewer than the 5 ranks; try .*_per_gpu 1"),
    (
        {"zero_optimization.stage": 2},
        {"WORLD_SIZE": "3"},
        r"train_batch_size 8: .*2 x 3 ranks = 6, and zero_optimization.stage 2 adds up .*; try train_batch_size 6",
    ),
    (
        {"m6.parallel.shares": [3, 2, 1]},
        {"WORLD_SIZE": "4"},
        r"train_batch_size 8: m6.parallel.shares \[3, 2, 1\] has 3 numbers, .* 4 ranks .*; leave it out for 1 on each",
    ),
    (
        {"train_batch_size": 16, "m6.parallel.shares": [4, 2, 2, 1], "m6.training.ep_size": 2},
        {"WORLD_SIZE": "4"},
        r"train_batch_size 16: \(1\) .* gives 4 ranks 9 micro-batches, but the step has 8; \(2\) .* gives 4, 2 to "
        r"ranks 0 to 1 along dp, which exchange tokens .*; set m6.parallel.shares=\[3, 1\], or leave it out for 2 on "
        r"each",
    ),
    ({"train_batch_size": 1}, {}, r"train_batch_size 1: .*try train_micro_batch_size_per_gpu 1, or train_batch_size 2"),
    ({"gradient_accumulation_steps": 3}, {}, r"gradient_accumulation_steps 3 contradicts .* = 4; leave it out"),
    ({"m6.training.ep_size": 2}, {}, r"ep_size 2 does not divide the world size 1"),
    ({"m6.training.ep_size": 4, "m6.moe.num_experts": 6}, {"WORLD_SIZE": "4"}, r"ep_size 4 .*num_experts 6"),
    ({"m6.training.ep_size": 4, "m6.moe.ranks_per_node": 3}, {"WORLD_SIZE": "4"}, r"ep_size 4 and ranks_per_node 3"),
    (
        {"m6.training.ep_size": 2, "m6.moe.overlap_parts": 2, "m6.data.sequence_length": 1,
         "train_micro_batch_size_per_gpu": 1},
        {},
        r"overlap_parts 2: .*per_gpu 1 x .*length 1 has at most one token, .*; use train_micro_batch_size_per_gpu 2 or",
    ),
    (
        {"m6.training.ep_size": 2, "m6.moe.overlap_parts": 200},
        {},
        r"overlap_parts 200: .* has at most 128 tokens, .* use .*per_gpu 4 or more, or overlap_parts 128",
    ),
    ({"m6.moe.exchange": "prototypes"}, {}, r"m6\.moe\.exchange .*prototypes"),
    ({"m6.training.ep_size": 2, "m6.moe": None}, {}, r"ep_size is 2 but the model is dense"),
    ({"m6.training.ep_size": 2, "zero_optimization.stage": 3}, {}, r"ep_size 2 .*stage 3 .*m6\.training\.ep_size 1"),
    ({"m6.moe.num_prototypes": 3}, {}, r"num_experts 4 .*num_prototypes 3"),
    ({"m6.moe.top_k": 3}, {}, r"top_k 3 .*2 experts of a prototype"),
    ({"m6.model.num_attention_heads": 3}, {}, r"hidden_size 32 .*num_attention_heads 3"),
    ({"m6.model.patch_encoder": "efficientnet_lite0"}, {}, r'm6\.model: .*efficientnet_lite0" needs .* 32, found 16'),
    ({"m6.data.image_tokenizer": "x"}, {}, r"image_tokenizer: only m6\.objectives\.text_to_image and .* weights are 0"),
    ({"m6.schedule.power": 2.0}, {}, r'm6\.schedule\.power: "decay": "cosine" ignores it'),
    ({"m6.schedule": {"decay": "constant", "final_lr_ratio": 0.5}}, {}, r"final_lr_ratio: .*constant.* ignores it"),
    (
        {"m6.pseudo_to_real": {"switch_step": 2, "plateau_improvement": 0.1}},
        {},
        r'plateau_improvement: "switch": "step" ignores it; it belongs to "loss_plateau"',
    ),
    ({"m6.model.patch_size": 15}, {}, r"image_size 32 .*patch_size 15"),
    ({"m6.data.sequence_length": 128}, {}, r"sequence_length 128 exceeds .*max_position_embeddings 64"),
    ({"m6.data.sequence_length": 8}, {}, r"sequence_length 8 leaves"),
    ({"m6.schedule.warmup_steps": 9}, {}, r"warmup_steps 9 .*steps 4; set m6.schedule.warmup_steps=0 to 4, or more"),
    (
        {"m6.schedule.decay": "wsd", "m6.schedule.decay_share": 0.5, "m6.schedule.warmup_steps": 3},
        {},
        r"warmup_steps 3 and a decay of 2 steps, decay_share 0.5, exceed .*total_steps 4; set .*steps=0 to 2, or",
    ),
    ({"m6.schedule.decay": "wsd"}, {}, r'decay_share .*"wsd"'),
    ({"m6.schedule.decay_share": 0.2}, {}, r'decay_share belongs to "decay": "wsd".*decay is "cosine"'),
    ({"m6.data.sources": {"tiny_txt": 1}}, {}, r'has no "tiny_txt"; did you mean "tiny_text"'),
    ({"m6.data.sources": {"tiny_text": 0}}, {}, r"every weight is 0"),
    ({"m6.data.sources": {"tiny_vqa": 1}}, {}, r'text_denoising.weight is 1.0, but no source of kind "text"'),
    ({"m6.data.path": "/nowhere"}, {}, r"/nowhere/manifest.json does not exist"),
    ({"m6.data.tokenizer": "/nowhere"}, {}, r"/nowhere holds no tokenizer"),
    ({"m6.model.text_vocab_size": 500}, {}, r"text_vocab_size is 500, .* has 400; set m6.model.text_vocab_size=400"),
    ({"m6.model.image_vocab_size": 32}, {}, r"image_vocab_size is 32, .* has 16; .*or .*--image-vocab-size 32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "environment", "expected"), FITTING)
def test_values_that_do_not_fit_each_other(folder: Path, changes: dict, environment: dict, expected: str):
    text = message(folder, changes, **environment)
    assert re.search(expected, text), text


BROKEN = [
    ('{"train_batch_size": 8,', "not readable as JSON"),
    ('{"train_batch_size": 8, "train_batch_size": 16}', '"train_batch_size" is given twice'),
    ('{"m6": {"moe": {"top_k": 1, "top_k": 2}}}', '"top_k" is given twice'),
    ('{"gradient_clipping": NaN}', "gradient_clipping: NaN is not a finite number"),
    ('{"m6": {"data": {"sources": {"a": 1, "b": 1e400}}}}', "m6.data.sources.b: 1e400 is not a finite number"),
    ('{"optimizer": {"params": {"betas": [0.9, -Infinity]}}}', "optimizer.params.betas.1: -Infinity is not a finite"),
    ('{"train_batch_size": 1' + "0" * 5000 + "}", "train_batch_size: 1000"),
    ('{"gradient_clipping": 1e999}', "1e999 is not a finite number"),
    ("[1, 2]", "expected a JSON object, found list"),
    ("", "not readable as JSON"),
    ("[" * 100_000, "not readable as JSON"),
    (b"\xff\xfe{", "not readable as JSON"),
    (None, "no such file"),
]


@pytest.mark.parametrize(("text", "expected"), BROKEN)
def test_a_file_that_is_no_json(tmp_path: Path, text: str | bytes | None, expected: str):
    config = tmp_path / "broken.json"
    if text is not None:
        config.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = user_error("pretrain", config, "--run-dir", tmp_path / "run")
    assert expected in found
    assert str(config) in found
    assert not (tmp_path / "run").exists()


def test_a_folder_is_no_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in (tmp_path / "folder", "folder"):
        found = user_error("pretrain", name, "--run-dir", tmp_path / "run")
        assert found == f"{name}: is a folder; expected a JSON file"


OVERRIDES = [
    ("m6.model.num_layers", "expected KEY.PATH=VALUE"),
    ("=4", "expected KEY.PATH=VALUE"),
    ("train_batch_size.x=4", "train_batch_size is not a section"),
    ("m6.model.num_layer=4", 'm6.model.num_layer: unknown key; did you mean "num_layers"?'),
    ("m6.model.num_layers=four", "num_layers"),
    ("m6..model=4", "an empty name"),
    ('m6.moe={"top_k": 1, "top_k": 2}', '"top_k" is given twice'),
    ("gradient_clipping=Infinity", "Infinity is not a finite number"),
]


@pytest.mark.parametrize(("override", "expected"), OVERRIDES)
def test_a_wrong_override(folder: Path, override: str, expected: str):
    assert expected in message(folder, {}, "--set", override)


def test_overrides_of_a_list(tmp_path: Path):
    file = tmp_path / "document.json"
    file.write_text('{"inputs": [{"source": "a"}, {"source": "b"}], "betas": [0.9, 0.99]}')
    changed = read_document(file, ("inputs.1.source=c", "inputs.0.name=x", "betas.1=0.95"))
    assert changed == {"inputs": [{"source": "a", "name": "x"}, {"source": "c"}], "betas": [0.9, 0.95]}
    for override, name in (("betas.2=1", "betas"), ("betas.first=1", "betas"), ("inputs.2.source=d", "inputs")):
        with pytest.raises(UserError, match=f"--set {override}: {name} is a list of 2, expected a number below that"):
            read_document(file, (override,))


def test_overrides_reach_any_depth_and_the_last_one_wins(folder: Path):
    config = load_config(
        write_tiny_config(folder),
        ("m6.model.num_layers=3", "m6.model.num_layers=1", "m6.logging.wandb_project=a=b", "m6.moe=null"),
    )
    assert (config.model.num_layers, config.model.moe) == (1, None)
    assert config.m6.logging.wandb_project == "a=b"
    assert config.document["m6"]["model"]["num_layers"] == 1


def test_defaults_and_what_deepspeed_gets(folder: Path):
    document = tiny_document(folder, m6__schedule={})
    config = parse_config(document)
    assert isinstance(config, RunConfig)
    assert config.m6.schedule.decay == "cosine"
    settings = config.deepspeed
    assert settings.optimizer_params == {"lr": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
    assert (settings.zero_stage, settings.precision) == (0, "fp32")
    # At stage 0 the trainer clips, and the optimizer is always built by it.
    sent = settings.engine_config(2, replicas=2)
    assert sent["gradient_accumulation_steps"] == 2
    assert sent["gradient_clipping"] == 0.0
    assert "optimizer" not in sent
    assert document["gradient_clipping"] == 1.0, "the document is not changed"


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_accumulation_follows_from_the_batch_sizes(folder: Path, world_size: int, accumulation: int):
    config = parse_config(tiny_document(folder))
    check_world_size(config, world_size)
    assert config.accumulation_steps(world_size) == accumulation
