"""What the commands do only for a person at a terminal."""

import os
import sys


def keep_bars_out_of_logs() -> None:
    """Tells Hugging Face's packages, which are imported later, to draw no bars where stderr is no terminal."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also those of transformers
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
