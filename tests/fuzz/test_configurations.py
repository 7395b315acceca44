"""Configurations with a wrong key or value: refused with a message that names it, or good enough to run."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m6.config.run import RunConfig, load_config
from m6.errors import UserError
from m6.planning.prediction import check_memory
from m6.runs.attestation import _differences, _facts
from m6.validation import read_document
from tests.fixtures.command import m6
from tests.fixtures.tiny_run import tiny_document
from tests.fuzz.examples import long_and_short, refusal, search

CONFIGS = sorted(Path(__file__).resolve().parents[2].glob("configs/*.json"))

numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**40, 2**63, 10**30, -(10**30), 10**400, 1e308, -1e308, 1e-308, 5e-324]),
    st.floats(allow_nan=True, allow_infinity=True),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(max_size=12),
    st.sampled_from(["auto", "", "\x00", "\ud800", "0-9999999999"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def keys_of(node: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key below a node."""
    if not isinstance(node, dict):
        return []
    return [path for key, value in node.items() for path in [(*at, key), *keys_of(value, (*at, key))]]


def with_defaults(document: dict[str, Any], settings: RunConfig) -> dict[str, Any]:
    """The document with every key of m6 that has a default."""
    return {**document, "m6": {**json.loads(settings.m6.model_dump_json()), **document["m6"]}}


@st.composite
def damaged(draw: st.DrawFn, documents: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """A document with one to three changes, and the names of the keys that were changed."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    names = []
    for _ in range(draw(st.integers(1, 3))):
        *parents, key = draw(st.sampled_from(keys_of(document)))
        node = document
        for parent in parents:
            node = node[parent]
        names += [*parents, key]
        kind = draw(st.sampled_from(["value", "value", "value", "delete", "rename", "add"]))
        if kind == "value":
            node[key] = draw(values)
        elif kind == "delete":
            del node[key]
        elif kind == "rename":
            position = draw(st.integers(0, len(key)))
            name = key[:position] + draw(st.characters()) + key[position:]
            node[name] = node.pop(key)
        else:
            node[draw(st.text(min_size=1, max_size=8))] = draw(values)
        if not document:
            break
    return document, names


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = [read_document(path) for path in CONFIGS]
    tiny = tiny_document(tmp_path_factory.mktemp("fuzz"))
    full = with_defaults(tiny, load_config_of(tiny, tmp_path_factory.mktemp("full")))
    return [*found, tiny, full]


def load_config_of(document: dict[str, Any], folder: Path) -> RunConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_config(path)


@long_and_short(150, 500)
def test_damaged_documents(number: int, documents: list[dict[str, Any]], tmp_path: Path):
    @given(damaged(documents))
    def check(case: tuple[dict[str, Any], list[str]]) -> None:
        document, names = case
        message = refusal(lambda: check_memory(load_config_of(document, tmp_path), 1, 1))
        assert "\n" not in message
        assert len(message) < 2000
        shown = [str(UserError(name)) for name in [*names, *document]]  # messages escape control characters
        assert not message or any(name in message for name in shown), message

    search(number, check)


@long_and_short(100, 400)
def test_misspelt_keys(number: int, documents: list[dict[str, Any]], tmp_path: Path):
    """A letter lost, doubled, changed or swapped: the message has the key as it was meant."""
    full = documents[-1]
    known = [path for path in keys_of(full) if len(path[-1]) >= 4]

    @given(st.sampled_from(known), st.sampled_from(["lost", "doubled", "changed", "swapped"]), st.integers(0, 100))
    def check(path: tuple[str, ...], how: str, where: int) -> None:
        *parents, key = path
        place = where % (len(key) - 1)
        before, letter, following, rest = key[:place], key[place], key[place + 1], key[place + 2 :]
        made = {"lost": following, "doubled": 2 * letter + following, "changed": f"q{following}"}
        name = before + made.get(how, following + letter) + rest
        document = copy.deepcopy(full)
        node = document
        for parent in parents:
            node = node[parent]
        if name in node:
            return
        node[name] = node.pop(key)
        message = refusal(lambda: load_config_of(document, tmp_path))
        assert name in message
        assert f'"{key}"' in message, message

    search(number, check)


@long_and_short(60, 400)
def test_ranks_with_other_configurations(number: int, documents: list[dict[str, Any]], tmp_path: Path):
    """Whatever differs between two valid configurations is named with both values."""

    pairs = st.sampled_from(documents).flatmap(lambda document: st.tuples(st.just(document), damaged([document])))

    @given(pairs)
    def check(case: tuple[dict[str, Any], tuple[dict[str, Any], list[str]]]) -> None:
        original, (document, names) = case
        if refusal(lambda: load_config_of(document, tmp_path)):
            return
        both = [_facts(load_config_of(each, tmp_path), restart=False) for each in (document, original)]
        said = _differences(*both)
        assert bool(said) != (json.dumps(document, sort_keys=True) == json.dumps(original, sort_keys=True))
        assert all(any(name in line for name in names) for line in said if not line.startswith("checksum")), said

    search(number, check)


@long_and_short(100, 400)
def test_damaged_text(number: int, documents: list[dict[str, Any]], tmp_path: Path):
    """Bytes that were cut, doubled or changed, as a broken copy has them."""
    text = json.dumps(documents[-2], indent=1).encode()
    path = tmp_path / "config.json"

    @given(st.integers(0, len(text)), st.integers(0, 40), st.binary(max_size=8))
    def check(position: int, removed: int, added: bytes) -> None:
        path.write_bytes(text[:position] + added + text[position + removed :])
        message = refusal(lambda: load_config(path))
        assert not message or str(path) in message

    search(number, check)


@long_and_short(100, 400)
def test_overrides(number: int, documents: list[dict[str, Any]], tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(documents[-2]), encoding="utf-8")
    names = st.sampled_from([".".join(key) for key in keys_of(documents[-1])])

    @given(
        st.one_of(names, st.text(max_size=20)),
        st.sampled_from(["=", "", "==", "+="]),
        st.one_of(st.text(max_size=12), values.map(json.dumps)),
    )
    def check(key: str, sign: str, value: str) -> None:
        assert "\n" not in refusal(lambda: load_config(path, (f"{key}{sign}{value}",)))

    search(number, check)


@pytest.mark.slow
def test_what_is_accepted_runs(documents: list[dict[str, Any]], tmp_path: Path):
    """A configuration that passes every check trains, or ends with a message: never with a traceback."""
    tried: list[int] = []

    @given(damaged(documents[-2:]))
    def check(case: tuple[dict[str, Any], list[str]]) -> None:
        document, _ = case
        if len(tried) >= 25 or refusal(lambda: check_memory(load_config_of(document, tmp_path), 1, 1)):
            return
        tried.append(1)
        run = tmp_path / f"run_{len(tried)}"
        outcome = m6(
            "pretrain",
            tmp_path / "config.json",
            "--run-dir",
            run,
            "--set",
            "m6.training.total_steps=2",
            "--set",
            "m6.schedule.warmup_steps=0",
        )
        assert outcome.code in (0, 1, 2), outcome.stderr
        assert "Traceback" not in outcome.stderr, (document, outcome.stderr)

    search(1000, check)
    assert tried
