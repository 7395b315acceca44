"""DeepSpeed's part of a run's JSON: whatever DeepSpeed would ignore, or refuse late and deep inside, is told early."""

import copy
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from m6.config.deepspeed import DeepSpeedSections, split_deepspeed
from m6.config.deepspeed_ignored import REFUSED
from m6.errors import UserError

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
ADAFACTOR = {"type": "Adafactor", "params": {"lr": 1e-3}}
BF16 = {"enabled": True}
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


def keys(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy({**BASE, **changes})


def zero(stage: int, **section: Any) -> dict[str, Any]:
    return keys(zero_optimization={"stage": stage, **section})


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_would_be_ignored_says_what_to_use(key: str):
    *sections, inner = key.split(".")
    changes: dict[str, Any] = {inner: True if sections else {}}
    for section in reversed(sections):
        # Stage 3, where no key of zero_optimization is refused for its stage.
        changes = {section: {**changes, **({"stage": 3} if section == "zero_optimization" else {})}}
    with pytest.raises(UserError) as caught:
        split_deepspeed(keys(**changes))
    assert str(caught.value) == f"{key}: not used here: {REFUSED[key]}"


MISSPELT = [("stag", 'did you mean "stage"?'), ("overlap_com", 'did you mean "overlap_comm"?'), ("cpu_offloading", "")]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("key", "valid"), MISSPELT)
def test_a_misspelt_key_is_not_told_its_stage(stage: int, key: str, valid: str):
    with pytest.raises(UserError) as caught:
        split_deepspeed(keys(zero_optimization={"stage": stage, key: 2}))
    assert str(caught.value).startswith(f"zero_optimization.{key}: unknown key; {valid}")


IGNORED = [
    (zero(1, offload_param={"device": "cpu"}), "zero_optimization.offload_param: DeepSpeed ignores it at stage 1"),
    (zero(2, offload_param={"device": "cpu"}), "zero_optimization.offload_param: DeepSpeed ignores it at stage 2"),
    (zero(2, stage3_prefetch_bucket_size=1000), "stage3_prefetch_bucket_size: DeepSpeed ignores it at stage 2"),
    (zero(2, sub_group_size=1000), "sub_group_size: DeepSpeed ignores it at stage 2"),
    (zero(2, zero_quantized_gradients=True), "zero_quantized_gradients: DeepSpeed ignores it at stage 2"),
    (zero(0, overlap_comm=True), "overlap_comm: DeepSpeed ignores it at stage 0"),
    (zero(0, offload_optimizer={"device": "cpu"}), "offload_optimizer: DeepSpeed ignores it at stage 0"),
    (zero(1, offload_optimizer={"device": "nvme"}), 'offload_optimizer.device: "nvme" is not used here'),
    (zero(3, offload_optimizer={"device": "nvme"}), "our checkpoints do not hold a state"),
    (zero(3, offload_param={"nvme_path": "/tmp"}), 'nvme_path: DeepSpeed ignores it with "device": "none"'),
    (zero(2, offload_optimizer={"nvme_path": "/tmp"}), "nvme_path: not used here: the optimizer's state cannot lie on"),
    (keys(aio={"block_size": 1}), "aio: DeepSpeed ignores it"),
    (zero(3, round_robin_gradients=True), "round_robin_gradients: DeepSpeed ignores it at stage 3; it needs stage 1"),
    (zero(3, offload_param={"device": "cpu", "max_in_cpu": 1}), 'offload_param.max_in_cpu: DeepSpeed ignores it with'),
    (zero(3, offload_optimizer={"device": "cpu", "fast_init": True}), 'fast_init: not used here'),
    (zero(3, offload_param={"device": "nvme"}), "zero_optimization.offload_param.nvme_path: missing"),
    (zero(2, reduce_bucket_size="auto"), 'zero_optimization.reduce_bucket_size: "auto" would be ignored'),
    (keys(bf16=BF16), "bf16.enabled needs zero_optimization.stage 1 or more"),
    (keys(fp16=BF16), "fp16.enabled needs zero_optimization.stage 1 or more"),
    ({**zero(2), "bf16": BF16, "fp16": BF16}, "fp16.enabled and bf16.enabled are both true"),
    ({**keys(optimizer=ADAFACTOR), "fp16": BF16}, "in 16 bits Adafactor is for offloaded experts alone: set m6"),
    ({**zero(2), "optimizer": ADAFACTOR, "fp16": BF16}, "optimizer.type to AdamW at stage 1 or 2"),
    ({**zero(1), "optimizer": ADAFACTOR}, "Adafactor needs zero_optimization.stage 0, found 1"),
    ({**zero(3), "optimizer": ADAFACTOR}, "Adafactor needs zero_optimization.stage 0, found 3"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "expected"), IGNORED, ids=[expected for _, expected in IGNORED])
def test_what_has_no_effect_at_a_stage(document: dict[str, Any], expected: str):
    with pytest.raises(UserError) as caught:
        split_deepspeed(document)
    assert expected in str(caught.value)


DEEP = [
    (zero(2, overlap_com=True), 'zero_optimization.overlap_com: unknown key; did you mean "overlap_comm"?'),
    (zero(3, stage3_prefetch_bucketsize=1), 'did you mean "stage3_prefetch_bucket_size"?'),
    (zero(2, reduce_bucket_size="large"), "zero_optimization.reduce_bucket_size: input should be a valid integer"),
    (zero(2, reduce_bucket_size=0), "zero_optimization.reduce_bucket_size: input should be greater than 0, found 0"),
    ({**zero(3, zero_quantized_weights=True), "torch_autocast": AUTOCAST}, "cannot be combined with torch_autocast"),
    (keys(fp16={"initial_scale_power": 63}), "fp16.initial_scale_power: expected at most 62, found 63"),
    (zero(2, allgather_bucket_size=1), "allgather_bucket_size: expected a multiple of 2, found 1"),
    (zero(2, offload_optimizer={"devise": "cpu"}), 'offload_optimizer.devise: unknown key; did you mean "device"?'),
    (zero(2, offload_optimizer={"device": "gpu"}), "offload_optimizer.device: input should be 'none', 'cpu' or 'nvme'"),
    (zero(2, offload_optimizer="cpu"), "zero_optimization.offload_optimizer: input should be"),
    (zero(3, offload_param={"device": 1}), "zero_optimization.offload_param.device: input should be"),
    (keys(bf16={"enable": True}), 'bf16.enable: unknown key; did you mean "enabled"?'),
    (keys(fp16={"loss_scale_windows": 3}), 'fp16.loss_scale_windows: unknown key; did you mean "loss_scale_window"?'),
    (keys(fp16={"loss_scale": 8, "hysteresis": 1}), "fp16.hysteresis: DeepSpeed ignores it with a constant"),
    (keys(fp16={"loss_scale": "big"}), "fp16.loss_scale: input should be a valid number"),
    (keys(fp16={"enabled": True, "min_loss_scale": 0}), "fp16.min_loss_scale: input should be greater than 0, found 0"),
    (keys(comms_logger={"verbos": True}), 'comms_logger.verbos: unknown key; did you mean "verbose"?'),
    (keys(torch_autocast={"enabled": True}), "torch_autocast.dtype: missing"),
    ({**zero(1), "bf16": {"enabled": True}, "torch_autocast": AUTOCAST}, "torch_autocast: is for weights in fp32, and"),
    (keys(torch_autocast={"enabled": True, "dtype": "float16"}), "torch_autocast.dtype: input should be 'bfloat16'"),
    (keys(optimizer={"type": "Adam", "params": {"lr": 1}}), "unknown optimizer 'Adam'; did you mean \"AdamW\"?"),
    (keys(optimizer={"type": "Adafactor", "params": {"lr": 1, "eps": 1}}), "optimizer.params.eps: unknown key"),
    (
        keys(optimizer={"type": "Adafactor", "params": {"lr": 1, "clipping_threshold": 0.5}}),
        "optimizer.params.clipping_threshold: input should be greater than or equal to 1, found 0.5",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("document", "expected"), DEEP, ids=[expected for _, expected in DEEP])
def test_what_deepspeed_would_refuse_with_a_traceback(document: dict[str, Any], expected: str):
    with pytest.raises(UserError) as caught:
        split_deepspeed(document)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


ACCEPTED = [
    (keys(), 0, "fp32"),
    (zero(0), 0, "fp32"),
    ({**zero(1), "bf16": BF16}, 1, "bf16"),
    ({**zero(2, contiguous_gradients=True, reduce_scatter=True, overlap_comm=False), "bf16": BF16}, 2, "bf16"),
    ({**zero(2, offload_optimizer={"device": "cpu", "pin_memory": False}), "fp16": BF16}, 2, "fp16"),
    (zero(3, offload_param={"device": "nvme", "nvme_path": "/scratch"}, sub_group_size=1e8), 3, "fp32"),
    ({**zero(3, offload_optimizer={"device": "cpu", "pin_memory": False}), "bf16": {"enabled": False}}, 3, "fp32"),
    (keys(optimizer=ADAFACTOR, torch_autocast={"enabled": True, "dtype": "bfloat16"}), 0, "fp32"),
    ({**zero(3, offload_param={"device": "nvme", "nvme_path": "/x"}), "aio": {"queue_depth": 8}}, 3, "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "stage", "precision"), ACCEPTED)
def test_what_has_an_effect_is_accepted_and_passed_on(document: dict[str, Any], stage: int, precision: str):
    before = copy.deepcopy(document)
    settings = split_deepspeed(document)
    assert (settings.zero_stage, settings.precision) == (stage, precision)
    assert document == before
    sent = settings.engine_config(settings.train_batch_size // settings.micro_batch_size, replicas=1)
    for key in document.keys() - {"optimizer", "gradient_clipping"}:
        assert sent[key] == document[key]
    assert sent["gradient_clipping"] == (1.0 if stage else 0.0)
    assert sent["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_precision_that_the_device_has_not(monkeypatch: pytest.MonkeyPatch, precision: str):
    settings = split_deepspeed({**zero(2), precision: {"enabled": True}})
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), f"is_{precision}_supported", lambda: True)
    settings.check_device()
    monkeypatch.setattr(get_accelerator(), f"is_{precision}_supported", lambda: False)
    with pytest.raises(UserError, match=rf"{precision}.enabled: the \w+ of this machine does not support it"):
        settings.check_device()


def section_pairs() -> Iterator[tuple[str, type[BaseModel], type[BaseModel]]]:
    """Each section, with its model here and that of DeepSpeed; sections of sections follow their section."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    of_deepspeed = {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "zero_optimization": DeepSpeedZeroConfig,
    }
    pairs = [
        (name, model_in(ours.annotation), of_deepspeed[name]) for name, ours in DeepSpeedSections.model_fields.items()
    ]
    for name, ours, theirs in pairs:
        assert ours is not None
        yield name, ours, theirs
        for key, field in ours.model_fields.items():
            if (inner := model_in(field.annotation)) is not None:
                pairs.append((f"{name}.{key}", inner, model_in(theirs.model_fields[key].annotation)))


def model_in(annotation: Any) -> type[BaseModel] | None:
    options = (annotation, *get_args(annotation))
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def test_deepspeed_has_the_same_keys():
    """A key of DeepSpeed is accepted or refused with a reason. One that an upgrade adds fails here."""
    seen = []
    for name, ours, theirs in section_pairs():
        keys = {field.alias or key for key, field in theirs.model_fields.items()}
        refused = {key.removeprefix(f"{name}.") for key in REFUSED if key.rpartition(".")[0] == name}
        assert ours.model_fields.keys() | refused == keys, name
        assert not ours.model_fields.keys() & refused, name
        seen.append(name)
    inner = ["offload_param", "offload_optimizer", "leaf_module"]
    assert seen == ["bf16", "fp16", "comms_logger", "zero_optimization", *(f"zero_optimization.{key}" for key in inner)]


VALUES: list[Any] = [
    *(True, False, None, "true", "off", "x", "1", "none", "cpu", "nvme", "/x"),
    *(0, 1, 2, 3, 4, -1, 1.0, 1.5, -0.5, 1e8, 5e8, 1e17, 1e18),
    *([], ["x"], [1], {}, {"x": 1}),
]


def test_deepspeed_accepts_what_is_accepted_here():
    """It would otherwise refuse a value with a traceback on every rank. What is accepted also means the same to it."""
    compared = 0
    for name, ours, theirs in section_pairs():
        names = {field.alias or key: key for key, field in theirs.model_fields.items()}
        for key in ours.model_fields:
            for value in VALUES:
                # The constant loss scale and the dynamic one are checked only where fp16 is on.
                document = {key: value} if name != "fp16" or key == "enabled" else {"enabled": True, key: value}
                try:
                    read = ours.model_validate_json(json.dumps(document))
                except ValidationError:
                    continue
                found = theirs(**document).model_dump()[names[key]]
                expected = read.model_dump()[key]
                if isinstance(expected, (bool, int, float)):
                    assert (found, type(found)) == (expected, type(expected)), (name, document)
                    compared += 1
    assert compared > 150


def test_deepspeed_has_the_same_defaults():
    for name, ours, theirs in section_pairs():
        defaults = {field.alias or key: field.get_default() for key, field in theirs.model_fields.items()}
        for key, field in ours.model_fields.items():
            if isinstance(default := field.get_default(), (bool, int, float, str)):
                assert default == defaults[key], f"{name}.{key}"


@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size"])
def test_a_size_may_be_written_with_an_exponent_and_true_is_none(key: str):
    assert split_deepspeed(zero(1, **{key: 5e8})).zero_stage == 1
    with pytest.raises(UserError, match=rf"zero_optimization\.{key}: input should be a number, found True"):
        split_deepspeed(zero(1, **{key: True}))
