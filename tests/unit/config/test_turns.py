"""What ``m6.training.micro_batches_at_once`` refuses."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.checks import check_world_size
from m6.config.run import parse_config
from m6.errors import UserError
from tests.fixtures.tiny_run import tiny_document

OFFLOAD = {"device_budget_mib": 100.0, "rules": [{"tensor": "activation", "place": "host"}]}


def turns(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"m6__training__micro_batches_at_once": 2, "m6__training__ep_size": 2}
    return tiny_document(folder, **given | changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("ep_size 1: all experts are on this rank", {"m6__training__ep_size": 1}),
        ("m6.moe.overlap_parts 2: each of them computes", {"m6__moe__overlap_parts": 2}),
        (
            'deterministic "any_world": the gradients of each micro-batch',
            {"m6__training__deterministic": "any_world"},
        ),
        ("m6.parallel.pipeline: its schedule", {"m6__parallel__pipeline": {"num_ranks": 2}}),
        (
            'm6.pseudo_to_real.switch "gradient_correlation": it tells the gradients of the layers apart',
            {"m6__pseudo_to_real": {"switch_step": 2, "switch": "gradient_correlation"}},
        ),
        ("m6.training.batch_ramp: the number", {"m6__training__batch_ramp": [{"steps": 1, "batch_size": 4}]}),
        ("m6.offload.rules: activations are offloaded block by block", {"m6__offload": OFFLOAD}),
    ],
)
def test_what_needs_one_after_the_other_is_refused(tmp_path: Path, message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        parse_config(turns(tmp_path, **changes))
    assert "m6.training.micro_batches_at_once 2, m6." in str(error.value)
    assert message in str(error.value)


def test_the_micro_batches_of_a_rank_are_divided(tmp_path: Path) -> None:
    config = parse_config(turns(tmp_path))
    check_world_size(config, 2)  # 8 rows: 2 micro-batches of 2 on each of 2 ranks
    with pytest.raises(UserError, match=r"micro_batches_at_once 2 does not divide the 1 micro-batches .* use 1, or a"):
        check_world_size(config, 4)
    once = {"m6__offload": {**OFFLOAD, "rules": [], "update": "backward"}, "gradient_clipping": 0.0}
    check_world_size(parse_config(turns(tmp_path, **once)), 2)  # one gradient of both micro-batches
    with pytest.raises(UserError, match=r"backward.* needs one micro-batch a step, .* but train_batch_size 16 makes 4"):
        check_world_size(parse_config(turns(tmp_path, **once, train_batch_size=16)), 2)
    with pytest.raises(UserError, match=r"m6\.training\.micro_batches_at_once"):
        parse_config(turns(tmp_path, m6__training__micro_batches_at_once=0))
