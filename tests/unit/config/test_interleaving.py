"""What ``m6.training.overlap_micro_batches`` refuses."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.checks import check_world_size
from m6.config.run import parse_config
from m6.errors import UserError
from tests.fixtures.tiny_run import tiny_document

OFFLOAD = {"device_budget_mib": 100.0, "rules": [{"tensor": "activation", "place": "host"}]}


def interleaved(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"m6__training__overlap_micro_batches": 2, "m6__training__ep_size": 2}
    return tiny_document(folder, **given | changes)


def test_the_micro_batches_of_a_rank_are_divided(tmp_path: Path) -> None:
    config = parse_config(interleaved(tmp_path))
    check_world_size(config, 2)  # 8 rows: 2 micro-batches of 2 on each of 2 ranks
    with pytest.raises(
        UserError, match=r"they come in .*ep_size 2 x overlap_micro_batches 2 = 4, and the 4 .* 8 or more"
    ):
        check_world_size(config, 4)
    once = {"m6__offload": {**OFFLOAD, "rules": [], "update": "backward"}, "gradient_clipping": 0.0}
    check_world_size(parse_config(interleaved(tmp_path, **once)), 2)  # one gradient of both micro-batches
    with pytest.raises(UserError, match=r"backward.* needs one micro-batch a step, .* but train_batch_size 16 makes 4"):
        check_world_size(parse_config(interleaved(tmp_path, **once, train_batch_size=16)), 2)
    with pytest.raises(UserError, match=r"m6\.training\.overlap_micro_batches"):
        parse_config(interleaved(tmp_path, m6__training__overlap_micro_batches=0))
