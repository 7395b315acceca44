"""Classes that an export names by ``auto_map``, and what they keep of it."""

from typing import Any


def without_auto_map(owner: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a class that loads an export, as it should keep and save them.

    Only the classes that transformers loads from the export itself, with ``trust_remote_code``, save their code. Saved
    by the same classes of this package, ``auto_map`` would name files that are not there.

    Args:
        owner: the object, of a class that transformers can save.
        arguments: what its JSON file holds.
    """
    if owner._auto_class is not None:
        return arguments
    return {name: value for name, value in arguments.items() if name != "auto_map"}
