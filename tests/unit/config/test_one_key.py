"""Each feature is switched on with one key in the configurations of GPUs, unless mathematics is against it."""

import pytest

from m6.config.run import load_config
from m6.errors import UserError
from m6.shipped import CONFIGS

FEATURES = {
    "pipeline": "m6.parallel.pipeline.num_ranks=2",
    "schedule": 'm6.parallel.pipeline={"num_ranks": 2, "schedule": "zbv"}',
    "slices": 'm6.parallel.pipeline={"num_ranks": 2, "slices": 3}',
    "tensor": "m6.parallel.tensor.num_ranks=2",
    "any_world": 'm6.training.deterministic="any_world"',
    "top_k": 'm6.communication={"gradients": "top_k", "density": 0.01}',
    "powersgd": 'm6.communication={"gradients": "powersgd", "rank": 4}',
    "offload": "m6.offload.device_budget_mib=60000",
    "elastic": "m6.elastic.max_nodes=128",
    "interleaved": "m6.training.overlap_micro_batches=2",
    "ramp": 'm6.training.batch_ramp=[{"steps": 10, "batch_size": 32}]',
    "delay": "m6.gradient_delay={}",
}
RECOMMENDED = ("m6_base", "m6_10b", "m6_100b", "m6_1t")
PAPERS = tuple(f"papers/{name}" for name in ("m6t_base", "m6t_10b", "m6t_100b", "m6t_1t", "m6_10t"))
ROWS_IN_TURN = 'm6.moe.drop_order "position" fills experts with a whole row before the beginning of the next one'
ONE_AFTER_THE_OTHER = "m6.parallel.pipeline has a schedule, which orders the passes of micro-batches"
MEMORY = "m6.offload plans the memory of one number of micro-batches"
SAME_TENSORS = "keeps of each tensor what it has not sent, but m6.pseudo_to_real begins with shared layers"
LOSS = "accept the loss with m6.gradient_delay.accept_loss=true"
# What a configuration already has, and why that does not go with the feature.
REFUSED = {
    ("m6_1t", "interleaved"): ONE_AFTER_THE_OTHER,
    ("m6_1t", "delay"): '"zbv" ends each step with a flush',
    **{(name, "slices"): ROWS_IN_TURN for name in PAPERS},
    **{(name, "delay"): LOSS for name in PAPERS},  # without Muon
    **{("papers/m6_10t", feature): ONE_AFTER_THE_OTHER for feature in ("pipeline", "schedule", "slices")},
    **{("papers/m6_10t", feature): SAME_TENSORS for feature in ("top_k", "powersgd")},
    ("papers/m6t_1t", "ramp"): MEMORY,
    ("papers/m6_10t", "ramp"): MEMORY,
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", [*RECOMMENDED, *PAPERS])
def test_a_feature_takes_one_key(name: str, feature: str):
    path, change = CONFIGS / f"{name}.json", (FEATURES[feature],)
    if (name, feature) in REFUSED:
        with pytest.raises(UserError) as error:
            load_config(path, change)
        assert REFUSED[name, feature] in str(error.value)
    else:
        load_config(path, change)
