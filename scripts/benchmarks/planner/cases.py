"""What is measured: four models, each with a global batch of its own, in layouts of one to four processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from m6.planning.cost.layout import ParallelLayout

CONFIG = "configs/m6_cpu.json"
STEPS = 6
"""of which the first does not count"""

# Dense, sparse, mostly experts, and mostly activations.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "m6.moe": None,
        "m6.model.hidden_size": 256,
        "m6.model.num_attention_heads": 4,
        "m6.model.ffn_hidden_size": 1024,
        "m6.data.sequence_length": 128,
        "train_batch_size": 16,
    },
    "sparse": {"m6.data.sequence_length": 128, "train_batch_size": 16},
    "experts": {
        "m6.model.hidden_size": 128,
        "m6.model.num_attention_heads": 4,
        "m6.model.num_layers": 2,
        "m6.model.ffn_hidden_size": 1024,
        "m6.moe.num_experts": 64,
        "m6.data.sequence_length": 128,
        "train_batch_size": 16,
    },
    "long": {
        "m6.model.hidden_size": 128,
        "m6.model.num_attention_heads": 4,
        "m6.model.ffn_hidden_size": 512,
        "m6.model.num_layers": 3,
        "m6.moe.num_experts": 8,
        "m6.data.sequence_length": 256,
        "train_batch_size": 16,
    },
}


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        fit: the planner's constants may be fitted to it; it is left out of the score.
    """

    model: str
    layout: ParallelLayout
    fit: bool = False

    @property
    def name(self) -> str:
        layout = self.layout
        parts = [self.model, f"w{layout.world_size}", f"ep{layout.ep_size}", f"z{layout.zero_stage}"]
        return "_".join([*parts, f"mb{layout.micro_batch_size}", *(["ckpt"] if layout.checkpointing else [])])

    def overrides(self) -> dict[str, Any]:
        """Values for ``--set``."""
        layout = self.layout
        return {
            **MODELS[self.model],
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "zero_optimization.stage": layout.zero_stage,
            "m6.training.ep_size": layout.ep_size,
            "m6.training.activation_checkpointing": layout.checkpointing,
            "m6.training.total_steps": STEPS,
            "m6.schedule.warmup_steps": 1,
            "m6.data.num_workers": 0,
            "m6.evaluation.num_rows": 1,
            "m6.logging.interval_steps": 1,
        }

    def columns(self) -> dict[str, Any]:
        layout = asdict(self.layout)
        names = ("world_size", "ep_size", "zero_stage", "micro_batch_size", "checkpointing")
        return {"model": self.model, "use": "fit" if self.fit else "test", **{name: layout[name] for name in names}}


def _cases() -> list[Case]:
    # world, ep, stage, micro-batch, checkpointing; "*": constants are fitted to it
    table = {
        "dense": "1 1 0 16 0*, 1 1 0 4 0, 1 1 0 16 1, 1 1 2 16 0, 2 1 0 8 0, 2 1 1 8 0, 2 1 2 4 0*, 2 1 3 8 0, "
        "4 1 0 4 0, 4 1 2 4 0, 4 1 1 2 1*",
        "sparse": "1 1 0 16 0, 1 1 0 8 1*, 2 1 0 8 0, 2 2 0 8 0*, 2 2 1 8 0, 2 2 2 4 0, 2 1 3 8 0*, 4 4 0 4 0, "
        "4 2 1 4 0, 4 4 2 4 1",
        "experts": "1 1 0 16 0*, 1 1 1 16 0, 2 1 0 8 0, 2 2 0 8 0, 2 2 0 8 1, 2 2 1 8 0*, 4 4 0 4 0*, 4 2 2 4 0",
        "long": "1 1 0 16 0, 1 1 0 16 1*, 1 1 0 4 0, 1 1 1 4 1, 2 2 0 8 0, 2 1 0 8 1, 4 4 1 4 0*",
    }
    cases = []
    for model, rows in table.items():
        for row in rows.split(","):
            world, ep, stage, micro, checkpointing = (int(number) for number in row.replace("*", "").split())
            layout = ParallelLayout(world, ep, 1, 1, stage, micro, bool(checkpointing))
            cases.append(Case(model, layout, "*" in row))
    return cases


CASES = _cases()
