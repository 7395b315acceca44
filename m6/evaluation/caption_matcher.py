"""A run fine-tuned on image-text matching, as a filter of ``m6 data corpus``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from m6 import files
from m6.checkpoints.finetuning import is_exported
from m6.checkpoints.format import MANIFEST
from m6.checkpoints.loading import load_run_model, newest_complete_checkpoint
from m6.config.run import load_config
from m6.data.objectives import max_text_tokens
from m6.errors import UserError
from m6.evaluation.metrics import match_pairs
from m6.runs.processes import default_device
from m6.tokenizers.pictures import decode_picture

_OBJECTIVE = "image_text_matching"


class CaptionMatcher:
    """A ``m6.corpus.work.PictureScorer`` of a run.

    Args:
        run: the folder of a run. An exported model is not enough: the run's JSON holds the length of training texts.

    Raises:
        UserError: the folder is not a run, or the run was not trained on image_text_matching.
    """

    def __init__(self, run: Path) -> None:
        if is_exported(run):
            raise UserError(f"matching_model {run} is an exported model; name the run that it was made of")
        config = load_config(run / "config.json")
        if not config.m6.objectives.of(_OBJECTIVE).weight:
            raise UserError(
                f"matching_model {run} was not trained on {_OBJECTIVE}; fine-tune it with the weight of "
                f"m6.objectives.{_OBJECTIVE}"
            )
        self.identity = files.sha256(newest_complete_checkpoint(run).folder / MANIFEST)
        self._model, self._processor = load_run_model(run, default_device())
        self._max_tokens = max_text_tokens(_OBJECTIVE, config.m6.data.sequence_length, config.model.num_patches)

    def __call__(self, pictures: Sequence[bytes], captions: Sequence[str]) -> NDArray[np.float64]:
        """Returns the probability of "match" against "no match" of N image files with captions, float64 [N]."""
        decoded = [decode_picture(picture, self._model.config.image_size) for picture in pictures]
        odds = match_pairs(self._model, self._processor, decoded, captions, self._max_tokens)
        return expit(odds)
