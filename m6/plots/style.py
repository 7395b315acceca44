"""The style of all plots, and the writing of figures."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from m6.errors import UserError
from m6.files import atomic_path
from m6.fonts import chinese_font

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
}


@contextmanager
def plotting(**changes: Any) -> Iterator[ModuleType]:
    """Gives ``matplotlib.pyplot`` in the style of all plots, with Chinese glyphs; ``changes`` are further rcParams.

    Dots of the rcParams' names are double underscores: ``axes__grid=False``.
    """
    import matplotlib

    matplotlib.use("Agg")  # writes files, and needs no display
    from matplotlib import pyplot

    families = [*matplotlib.rcParams["font.family"], *_chinese_families()]
    chosen = _STYLE | {"font.family": families} | {name.replace("__", "."): value for name, value in changes.items()}
    with pyplot.rc_context(chosen):
        yield pyplot


@functools.cache
def _chinese_families() -> tuple[str, ...]:
    """Registers the Chinese font and returns its family. matplotlib uses it for glyphs missing in its own fonts."""
    from matplotlib import font_manager

    path = chinese_font()
    if path is None:
        return ()
    manager = font_manager.fontManager
    manager.addfont(path)
    entry = manager.ttflist[-1]
    # Bold titles use the only weight of this font. Without this entry matplotlib would warn in every plot.
    manager.ttflist.append(replace(entry, weight=700))
    return (entry.name,)


def save_figure(figure: Figure, out: Path, description: str = "") -> None:
    """Writes a figure as PNG atomically and closes it; UserError if the file cannot be written.

    Args:
        description: goes to the metadata of the file.
    """
    from matplotlib import pyplot

    try:
        with atomic_path(out) as temporary:
            figure.savefig(temporary, format="png", dpi=130, metadata={"Description": description})
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
