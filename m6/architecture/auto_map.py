"""``auto_map`` in the JSON files of an export: the names of its classes for transformers."""

from typing import Any


def without_auto_map(owner: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Removes ``auto_map`` from the arguments of an object, unless its class will save its code, too.

    transformers loads classes from an export with ``trust_remote_code``, and only these classes save their code. The
    same classes of this package save no code, so a saved ``auto_map`` would name missing files.

    Args:
        owner: the object, of a class with ``save_pretrained``.
        arguments: the content of its JSON file.
    """
    if owner._auto_class is not None:
        return arguments
    return {name: value for name, value in arguments.items() if name != "auto_map"}
