"""The start of an attempt: from the newest checkpoint of its run, the weights of another model, or random weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from m6.checkpoints.discovery import check_tokenizer_unchanged, complete_checkpoints
from m6.config.run import RunConfig
from m6.data.pretraining import PretrainingData
from m6.runs.data import check_sources_are_read, check_sources_unchanged, data_warnings
from m6.runs.directory import RunDirectory
from m6.runs.environment import misplacement


def check_start(config: RunConfig, run: RunDirectory, data: PretrainingData, restart: bool) -> None:
    """Checks whether the attempt can continue its newest checkpoint, or begin with its initial weights; writes nothing.

    Args:
        restart: the attempt begins at step 0, whatever the run holds.

    Raises:
        UserError: the checkpoint was trained with another tokenizer or on other data, the initial weights are missing,
            or a new run names a source but does not read it.
    """
    if complete_checkpoints(run.checkpoints) and not restart:
        check_tokenizer_unchanged(run.checkpoints, data.tokenizer.fingerprint)
        check_sources_unchanged(run.root, data)
        return
    check_sources_are_read(data)
    if config.m6.init is not None:
        from m6.checkpoints.initial import check_initial_weights

        check_initial_weights(config.m6.init, data.tokenizer)


def warn_at_start(config: RunConfig, data: PretrainingData, nodes: Sequence[str]) -> None:
    """Warns of likely mistakes: a placement of ranks unlike the planner's, and data lost to the model.

    Args:
        nodes: the name of each rank's node.
    """
    for problem in filter(None, (misplacement(config, nodes), *data_warnings(config, data))):
        print(f"warning: {problem}", file=sys.stderr)
