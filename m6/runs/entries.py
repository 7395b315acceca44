"""What a line of RUN/metrics.jsonl holds, checked where it is read: a disk or a person may have changed it."""

from __future__ import annotations

from typing import Any

from m6.errors import UserError

# Numbers that every line has which the training writes after an interval.
_OF_INTERVAL = (
    "time", "samples_seen", "tokens_seen", "skipped_steps", "bad_rows", "step_time_s", "data_wait_s",
    "checkpoint_stall_s", "tokens_per_second", "samples_per_second", "memory_bytes",
)  # fmt: skip
_OR_NULL = ("loss", "aux_loss", "learning_rate", "grad_norm", "model_flops_per_second", "mfu")
_SECTIONS = ("objectives", "validation", "validation_by_source", "experts", "gradient_noise")


class Entry(dict[str, Any]):
    """A line, or a part of one; a key that is not there is a damage of the file."""

    def __missing__(self, key: str) -> Any:
        raise UserError(f'metrics.jsonl: corrupt: an entry has no "{key}"')


def check_entry(entry: dict[str, Any]) -> Entry:
    """Checks the types of what is read by its name, and that other values are of a kind that lines have.

    Raises:
        ValueError: a value is of another type.
    """
    if not isinstance(entry.get("step"), int):
        raise ValueError("not an object with a step")
    for key, value in entry.items():
        if key in _OF_INTERVAL and not _is_number(value):
            raise ValueError(f"{key} is {value!r:.80}, expected a number")
        if key in _OR_NULL and not (value is None or _is_number(value)):
            raise ValueError(f"{key} is {value!r:.80}, expected a number or null")
        if key in _SECTIONS:
            _check_section(key, value, 1 + (key == "validation_by_source"))
    return _with_keys(entry)


def _check_section(name: str, value: object, depth: int) -> None:
    """Checks an object whose values are numbers or null, or such objects; those of experts are lists, one a layer."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}, expected an object")
    for key, each in value.items():
        if name == "experts" and key == "sent_bytes":
            _check_section(f"experts.{key}", each, 1)
        elif name == "experts" and key != "prototypes":
            if not isinstance(each, list):
                raise ValueError(f"experts.{key} is {each!r:.80}, expected a list")
            of_layers = str if key == "loads" else (int, float, type(None))
            if not all(isinstance(layer, of_layers) for layer in each):
                raise ValueError(f"experts.{key} has an entry of another type")
        elif depth > 1 or name == "experts":
            _check_section(f"{name}.{key}" if name != "experts" else "prototypes", each, depth - 1)
        elif name != "prototypes" and not (_is_number(each) or (each is None and name != "gradient_noise")):
            raise ValueError(f"{name}.{key} is {each!r:.80}, expected a number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return Entry((key, _with_keys(each)) for key, each in value.items())
    return value
