"""Rules for offloading: what they decide, and the error of each that decides nothing or cannot be followed."""

from typing import Any

import pytest

from m6.architecture.configuration import M6Config
from m6.config.deepspeed import DeepSpeedSettings, split_deepspeed
from m6.config.offload import OffloadRule, OffloadSettings
from m6.config.offload_rules import ExpertPlaces, resolve_activation_rules, resolve_rules
from m6.config.section_checks import apply_offload, check_offload
from m6.errors import UserError
from m6.validation import validate

# Layers 1 and 3 are sparse.
MODEL = {
    "text_vocab_size": 100,
    "image_vocab_size": 16,
    "hidden_size": 32,
    "num_layers": 4,
    "num_attention_heads": 2,
    "ffn_hidden_size": 64,
    "moe_layer_frequency": 2,
}


def model(**changes: Any) -> M6Config:
    return M6Config(**{**MODEL, **changes}, moe={"num_experts": 4})


def resolve(*rules: dict[str, Any], config: M6Config | None = None, dense_states_on_host: bool = False) -> ExpertPlaces:
    checked = [validate(OffloadRule, rule, f"m6.offload.rules.{index}") for index, rule in enumerate(rules)]
    resolve_activation_rules(checked, config or model(), checkpointing=False)
    return resolve_rules(checked, config or model(), dense_states_on_host)


def sparse_layers() -> list[int]:
    config = model()
    return [layer for layer in range(4) if config.is_moe_layer(layer)]


def places(owned: list[int] = (), streamed: list[int] = (), fetched: list[int] = ()) -> ExpertPlaces:  # type: ignore[assignment]
    return ExpertPlaces(frozenset(owned), frozenset(streamed), frozenset(fetched))


def test_no_rules_leave_everything_to_the_plan():
    assert resolve() == places()


def test_rules_by_place():
    first, second = sparse_layers()
    assert resolve({"kind": "expert", "place": "device"}) == places(owned=[first, second])
    assert resolve({"kind": "expert", "place": "stream"}) == places(streamed=[first, second])
    assert resolve({"kind": "expert", "place": "host"}) == places(fetched=[first, second])
    assert resolve({"kind": "expert", "tensor": "optimizer_state", "place": "host"}) == places(streamed=[first, second])


def test_the_last_rule_counts():
    first, second = sparse_layers()
    rules = [{"kind": "expert", "place": "stream"}, {"layers": f"{second}", "kind": "expert", "place": "auto"}]
    assert resolve(*rules) == places(streamed=[first])


def test_layers_by_numbers_and_ranges():
    first, second = sparse_layers()
    assert resolve({"layers": "0-1", "kind": "expert", "place": "device"}) == places(
        owned=[layer for layer in (first, second) if layer < 2]
    )
    assert resolve({"layers": f"{first}, {second}", "kind": "expert", "place": "device"}).owned == {first, second}


def test_what_is_true_anyway_may_be_said():
    assert resolve({"kind": "attention", "place": "device"}, {"kind": "embedding", "place": "auto"}) == places()


def test_activations_by_layers_and_kinds():
    rules = [
        OffloadRule(tensor="activation", place="host", layers="0-1"),
        OffloadRule(tensor="activation", place="auto", kind="embedding"),
        OffloadRule(tensor="activation", place="device", kind="norm"),
    ]
    found = resolve_activation_rules(rules, model(), checkpointing=False)
    assert found.host == {("attention", 0), ("ffn", 0), ("attention", 1), ("expert", 1), ("router", 1)}
    assert found.auto == {("embedding", None)}
    assert resolve_activation_rules([], model(), checkpointing=True).host == frozenset()
    with pytest.raises(UserError, match=r"rules.2: under m6.training.activation_checkpointing .* leave kind out"):
        resolve_activation_rules(rules, model(), checkpointing=True)
    assert resolve(*(rule.model_dump() for rule in rules)) == places()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [{"kind": "expert", "layers": "7-9", "place": "host"}],
            r"rules.0: matches nothing: no layer with expert is in",
        ),
        ([{"layers": "40", "place": "device"}], r"no layer of the model is in '40'; the nearest is 3 \(of 0 to 3\)"),
        ([{"kind": "embedding", "layers": "0", "place": "device"}], r"embedding is outside of the layers"),
        (
            [{"kind": "expert", "layers": "3-1", "place": "host"}],
            r'layers: expected numbers and ranges such as "0-11,14"',
        ),
        ([{"kind": "expert", "layers": "a", "place": "host"}], r"rules.0.layers: expected numbers"),
        ([{"kind": "experts", "place": "host"}], r"rules.0.kind.*'expert'.*found 'experts'"),
        ([{"kind": "expert", "place": "cpu"}], r"rules.0.place.*'host'.*found 'cpu'"),
        ([{"kind": "expert", "place": "host", "plase": "host"}], r'rules.0.plase: unknown key; did you mean "place"'),
        ([{"kind": "attention", "place": "stream"}], r'DeepSpeed.s engine holds attention.*add "kind": "expert"'),
        ([{"place": "host"}], r'rules.0: .* rules can only offload experts: add "kind": "expert"'),
        ([{"tensor": "activation", "place": "stream"}], r'rules.0: .* "place" of activations is device, host or a'),
        (
            [
                {"kind": "expert", "tensor": "parameter", "place": "device"},
                {"kind": "expert", "tensor": "gradient", "place": "host"},
            ],
            r"rules.1 contradicts m6.offload.rules.0 in layer",
        ),
    ],
)
def test_rules_that_are_wrong(rules: list[dict[str, Any]], message: str):
    with pytest.raises(UserError, match=message):
        resolve(*rules)


def test_a_dense_model_has_no_router():
    with pytest.raises(UserError, match="matches nothing: the model has no router; it has attention, embedding"):
        resolve({"kind": "router", "place": "device"}, config=M6Config(**MODEL))


def test_dense_optimizer_state_goes_as_a_whole():
    def check(*rules: dict[str, Any], stage: int = 1) -> DeepSpeedSettings:
        keys = {
            "train_batch_size": 2,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
        }
        settings = OffloadSettings(rules=[OffloadRule(**rule) for rule in rules])
        applied = apply_offload(settings, split_deepspeed(keys), model())
        check_offload(settings, applied, model(), checkpointing=False)
        return applied

    states = {"tensor": "optimizer_state", "place": "host"}
    on_host = {"device": "cpu", "pin_memory": True}
    assert check(states).keys["zero_optimization"] == {"stage": 1, "offload_optimizer": on_host}
    kinds = [{"kind": kind, **states} for kind in ("attention", "ffn", "norm", "router", "embedding")]
    assert check(*kinds).keys["zero_optimization"]["offload_optimizer"] == on_host
    assert "offload_optimizer" not in check({"kind": "expert", **states}).keys["zero_optimization"]
    with pytest.raises(UserError, match=r"offloads all of it or none: name every layer of norm, router too"):
        check(*(rule for rule in kinds if rule["kind"] not in ("norm", "router")))
    with pytest.raises(UserError, match=r"name every layer of attention, embedding, .*too"):
        check({"layers": "0-1", **states})
    with pytest.raises(UserError, match="stage 1 or 2, found 0"):
        check(states, stage=0)


def test_a_rule_against_deepspeeds_own_offload():
    rule = {"kind": "norm", "tensor": "optimizer_state", "place": "device"}
    with pytest.raises(UserError, match=r"rules.0: contradicts zero_optimization.offload_optimizer"):
        resolve(rule, dense_states_on_host=True)
