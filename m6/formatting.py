"""How tables and sizes look wherever people read them."""

from collections.abc import Iterable, Sequence

_ALIGNMENTS = {"l": "---", "r": "---:"}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str | None = None) -> str:
    """Rows of cells under a header, in Markdown.

    Args:
        header: the names of the columns.
        rows: as many cells each.
        align: ``l`` or ``r`` for each column; by default names on the left in the first, numbers on the right in the
            others.
    """
    align = align or "l" + "r" * (len(header) - 1)
    lines = [header, [_ALIGNMENTS[side] for side in align], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_bytes(number: float) -> str:
    """A size with the largest binary unit that leaves at least 1, such as ``61.8 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def format_mib(number: float) -> str:
    """A size in MiB, for columns and budgets that people compare."""
    return f"{number / 2**20:,.1f} MiB"
