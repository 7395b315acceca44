"""Settings of the commands' output: progress bars in logs, and file names of any bytes."""

import io
import os
import sys


def keep_bars_out_of_logs() -> None:
    """Turns off the progress bars of Hugging Face's packages where stderr is no terminal.

    It has to run before their import.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also those of transformers
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def print_any_name() -> None:
    """Lets stdout write file names outside of UTF-8, as their bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # otherwise the user's choice
        sys.stdout.reconfigure(errors="surrogateescape")
