"""One batch, split into micro-batches and ranks in every way: the gradients of all losses are those of float64.

Rows have unequal numbers of tokens and targets, and all auxiliary losses are on. The balance counts each sample by
itself: the other scopes are statistics of what is computed together (docs/guides/training.md, "Splits of a batch").
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from m6.config.run import parse_config
from m6.runs.data import open_data
from m6.training.engine.build import build_model
from tests.distributed.spawn import run_distributed
from tests.distributed.test_offloading import OFFLOAD
from tests.distributed.test_pipelines import pipeline, train_all
from tests.fixtures.tiny_run import tiny_document

ROUTERS = {
    "num_experts": 4,
    "num_prototypes": 2,
    "aux_loss_weight": 0.5,
    "z_loss_weight": 0.1,
    "balance_scope": "sequence",
}
# fp32 against float64, relative to the largest number of a gradient.
TOLERANCE = 1e-5


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of one step over 16 samples. After it AdamW's first moment is a tenth of the gradient."""
    settings = {
        "train_batch_size": 16,
        "gradient_clipping": 0.0,
        "m6__moe": ROUTERS,
        "m6__model__hidden_dropout": 0.0,
        "m6__model__initializer_range": 0.1,
        "m6__model__num_layers": 4,
        "m6__training__total_steps": 1,
        "m6__evaluation__interval_steps": 9,
    }
    return tiny_document(folder, **{**settings, **changes})


def micro_batch(size: int) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": size}


def zero(stage: int, ep_size: int = 1) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "m6__training__ep_size": ep_size}


def stages(schedule: str, **others: Any) -> dict[str, Any]:
    return {"m6__parallel__pipeline": {**pipeline(2, schedule), **others}}


# name -> (ranks, changes of the run)
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, micro_batch(16)),
    "in two": (1, micro_batch(8)),
    "one by one": (1, micro_batch(1)),
    "packed": (1, {**micro_batch(4), "m6__data__packing": True}),
    "offloaded": (1, {**micro_batch(4), "m6__offload": OFFLOAD}),
    "two ranks": (2, {**micro_batch(4), **zero(0)}),
    "any world": (2, {**micro_batch(2), **zero(1), "m6__training__deterministic": "any_world"}),
    "experts on two ranks": (2, {**micro_batch(1), **zero(2, 2)}),
    "turns": (2, {**micro_batch(2), **zero(1, 2), "m6__training__overlap_micro_batches": 2}),
    "pipeline": (2, {**micro_batch(2), **zero(1), **stages("1f1b")}),
    "two stages each": (2, {**micro_batch(4), **zero(0), **stages("zbv")}),
    "slices": (2, {**micro_batch(4), **zero(1), **stages("1f1b", slices=3)}),
    "pipelines with experts": (4, {**micro_batch(2), **zero(1, 2), **stages("interleaved_zero_bubble")}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a run of one step for each split."""
    folder = tmp_path_factory.mktemp("split")
    tiny_document(folder)  # builds the data before the ranks start
    for ranks in (1, 2, 4):
        chosen = {name: changes for name, (own, changes) in SPLITS.items() if own == ranks}
        run_distributed(train_all, ranks, [(document(folder, **each), folder / name) for name, each in chosen.items()])
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Gradients in float64 of the samples one after the other: means over all targets, and over all tokens."""
    config = parse_config(document(folder, **micro_batch(1)))
    model, _ = build_model(config, torch.device("cpu"))
    model.double().train()
    data = open_data(config)
    batches = [data.micro_batch(number) for number in range(16)]
    assert min(batch.num_tokens for batch in batches) < max(batch.num_tokens for batch in batches) / 2
    targets, tokens = (sum(getattr(each, name) for each in batches) for name in ("num_target_tokens", "num_tokens"))
    for batch in batches:
        output = model(**batch.model_inputs(), labels=batch.labels)
        (output.target_losses.sum() / targets + output.aux_loss * batch.num_tokens / tokens).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_gradients_do_not_depend_on_the_split(folder: Path, expected: dict[str, torch.Tensor], name: str):
    reader = CheckpointReader(complete_checkpoints(folder / name / "checkpoints")[-1])
    routers = [each for each in expected if each.endswith("router.weight")]
    assert len(routers) == 4
    for parameter, gradient in expected.items():
        found = 10 * reader.read(parameter, "exp_avg").double()
        error = (found - gradient).abs().max() / gradient.abs().max()
        assert error < TOLERANCE, (parameter, float(error))
