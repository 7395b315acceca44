"""What trains side by side: the same Transformer as our trainer runs it, and as a plain PyTorch loop runs GPT-2."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2Config, GPT2LMHeadModel

from m6.architecture.names import NUM_SPECIAL_TOKENS
from m6.config.run import parse_config
from m6.data.collate import IGNORED_LABEL, MicroBatch
from m6.data.objectives import OBJECTIVES
from m6.runs.processes import start
from m6.runs.signals import Requests
from m6.training.engine.build import build_engine
from m6.training.stages.stage import Stage
from m6.training.train_step import TrainStep

TEXT_VOCAB_SIZE = 10_000
IMAGE_VOCAB_SIZE = 1_024
VOCAB_SIZE = TEXT_VOCAB_SIZE + NUM_SPECIAL_TOKENS + IMAGE_VOCAB_SIZE
HEAD_SIZE = 64
MOE = {"num_experts": 8, "num_prototypes": 2}
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.98), "weight_decay": 0.01}
CLIPPING = 1.0


class Contestant:
    """Makes steps in a process of its own, as a user would run it: with its own threads, allocator and settings.

    Args:
        make_step: ``our_step`` or ``gpt2_step``; ``arguments`` are passed on to it.
    """

    def __init__(self, make_step: Callable[..., Callable[[], float]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, connection = context.Pipe()
        self._process = context.Process(target=_serve, args=(connection, make_step, arguments), daemon=True)
        self._process.start()
        connection.close()  # so that the end of the process is noticed
        self._connection.recv()

    def step(self) -> float:
        """Makes a step while all others rest; returns its seconds."""
        self._connection.send(True)
        seconds, loss = self._connection.recv()
        if not 0 < loss < math.inf:
            raise RuntimeError(f"the loss is {loss}")
        return seconds

    def cpu_seconds(self) -> float:
        """The processor time of the process so far, which other work on the machine hardly changes."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """The physical memory of the process."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, make_step: Callable[..., Callable[[], float]], arguments: tuple[Any, ...]) -> None:
    step = make_step(*arguments)
    connection.send(True)
    while connection.recv():
        begin = time.perf_counter()
        loss = step()
        connection.send((time.perf_counter() - begin, loss))


def language_modelling_batch(rows: int, sequence_length: int) -> MicroBatch:
    """Rows of random text, each one whole sample of the objective language_modelling."""
    shape = (rows, sequence_length)
    input_ids = torch.randint(TEXT_VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))
    labels = input_ids.clone()
    labels[:, 0] = IGNORED_LABEL
    labelled = labels != IGNORED_LABEL
    objective = OBJECTIVES.index("language_modelling")
    return MicroBatch(
        input_ids=input_ids,
        token_type_ids=torch.full(shape, 2),
        position_ids=torch.arange(sequence_length).repeat(rows, 1),
        sample_ids=torch.ones(shape, dtype=torch.int64),
        labels=labels,
        objective_ids=torch.where(labelled, objective, -1),
        data_source_ids=torch.where(labelled, 0, -1),
        pixel_values=torch.empty(0, 3, 64, 64),
        num_target_tokens=int(labelled.sum()),
        num_tokens=input_ids.numel(),
        num_samples=rows,
        num_token_pairs=rows * sequence_length**2,
    )


def our_step(hidden: int, layers: int, batch: MicroBatch, moe: dict[str, Any] | None) -> Callable[[], float]:
    """One step of the trainer, which returns the loss."""
    runtime = start()
    rows, sequence_length = batch.input_ids.shape
    document = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 0},
        "m6": {
            "model": {
                "text_vocab_size": TEXT_VOCAB_SIZE,
                "image_vocab_size": IMAGE_VOCAB_SIZE,
                "hidden_size": hidden,
                "num_layers": layers,
                "num_attention_heads": max(1, hidden // HEAD_SIZE),
                "ffn_hidden_size": 4 * hidden,
                "max_position_embeddings": sequence_length,
                "image_size": 64,
                "patch_size": 16,
            },
            "moe": moe,
            "data": {"path": "not-read", "tokenizer": "not-read", "sequence_length": sequence_length},
            "objectives": {},
            "training": {"total_steps": 1_000_000},
            "schedule": {"decay": "constant"},
        },
    }
    config = parse_config(document)
    train_step = TrainStep(build_engine(config, runtime), config, runtime, Stage(config, None))
    steps = itertools.count()
    return lambda: train_step(next(steps), [batch], Requests)[0].loss


def gpt2_step(
    hidden: int, layers: int, batch: MicroBatch, activation: str, our_runtime: bool = False
) -> Callable[[], float]:
    """One step of a plain PyTorch loop, which returns the loss; ``our_runtime`` adds what our runtime sets up."""
    if our_runtime:
        start()
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=batch.input_ids.shape[1],
        n_embd=hidden,
        n_layer=layers,
        n_head=max(1, hidden // HEAD_SIZE),
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def step() -> float:
        loss = model(input_ids=batch.input_ids, labels=batch.input_ids).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
