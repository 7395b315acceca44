"""Where the commands write: a terminal or a log, names of any bytes."""

import io
import os
import sys


def keep_bars_out_of_logs() -> None:
    """Tells Hugging Face's packages, which are imported later, to draw no bars where stderr is no terminal."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also those of transformers
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def print_any_name() -> None:
    """Lets stdout take the names of files that are not in UTF-8: as the bytes that they are."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # else the user chose
        sys.stdout.reconfigure(errors="surrogateescape")
