"""configs/README.md says what the settings say."""

from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import BaseModel

from m6.architecture.settings import ModelSettings
from m6.config.docs import config_readme
from m6.config.sections import M6Settings
from moe.config import MoEConfig

README = Path(__file__).resolve().parents[3] / "configs" / "README.md"


def section(text: str, path: str) -> dict[str, list[str]]:
    """{key: [type, default, meaning]} of the table under the heading of ``path``."""
    heading = "## The section `m6`" if path == "m6" else f"### `{path}`"
    body = text.split(heading + "\n")[1].split("\n##")[0]
    rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_readme_is_fresh():
    assert README.read_text(encoding="utf-8") == config_readme(), "run: python -m m6.config.docs > configs/README.md"


def test_every_key_is_there_with_a_meaning():
    text = config_readme()

    def check(settings: type[BaseModel], path: str) -> int:
        table = section(text, path)
        assert list(table) == list(settings.model_fields)
        assert all(len(row) == 3 and row[2].strip() for row in table.values())
        inner = [(n, f.annotation) for n, f in settings.model_fields.items()]
        models = [(n, kind) for n, kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
        return len(table) + sum(check(kind, f"{path}.{name}") for name, kind in models)

    assert check(M6Settings, "m6") > 30
    own = [field.name for field in fields(ModelSettings)]
    assert list(section(text, "m6.model")) == [name for name in own if name != "moe"]
    assert list(section(text, "m6.moe")) == [field.name for field in fields(MoEConfig)]


@pytest.mark.parametrize(
    ("path", "key", "kind", "default"),
    [
        ("m6.training", "total_steps", "integer > 0, ≤ 1,000,000,000,000", "required"),
        ("m6.training", "activation_checkpointing", "boolean", "`false`"),
        ("m6.schedule", "decay_share", "number > 0, ≤ 1 or null", "`null`"),
        ("m6.schedule", "final_lr_ratio", "number ≥ 0, ≤ 1", "`0.1`"),
        ("m6.logging", "wandb", '`"off"`, `"offline"`, `"online"`', '`"off"`'),
        ("m6.moe", "num_experts", "integer", "required"),
        ("m6.moe", "capacity_factor", "number or null", "`null`"),
        ("m6.data", "sources", "object of numbers or null", "`null`"),
    ],
)
def test_types_and_defaults(path, key, kind, default):
    assert section(config_readme(), path)[key][:2] == [kind, default]
