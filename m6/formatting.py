"""Formatting of Markdown tables, losses, byte sizes and lines of a log."""

import math
import sys
import time
from collections.abc import Iterable, Sequence

_ALIGNMENTS = {"l": "---", "r": "---:"}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str | None = None) -> str:
    """Returns a Markdown table.

    Args:
        header: the names of the columns.
        rows: the cells; each row has one cell for every column.
        align: one letter for each column, ``l`` (left) or ``r`` (right). By default the first column is aligned to
            the left and all others to the right.
    """
    align = align or "l" + "r" * (len(header) - 1)
    lines = [header, [_ALIGNMENTS[side] for side in align], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def perplexity(nats: float) -> float:
    """The exponential of a loss; infinite if it overflows."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def log_line(text: str) -> None:
    """Writes a line with the time to stderr."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


def format_bytes(number: float) -> str:
    """Formats a number of bytes with the largest binary unit in which it is at least 1, such as ``61.8 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def format_mib(number: float) -> str:
    """Formats a number of bytes in MiB, so values are easy to compare."""
    return f"{number / 2**20:,.1f} MiB"


def format_gb(number: float) -> str:
    """Formats a number of bytes in gigabytes of 10^9 bytes, as data sheets do."""
    return f"{number / 1e9:,.2f} GB"
