"""The adapter between a model and lm-evaluation-harness, and scores on the tasks of the harness."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from m6.checkpoints.loading import load_run_model
from m6.errors import UserError, nearest
from m6.files import write_json
from m6.formatting import markdown_table
from m6.generation.captioning import continue_text
from m6.runs.processes import default_device

Request = tuple[tuple[str, str], list[int], list[int]]
_NEW_TOKENS = 64  # of a continuation, if the task sets no limit
_ARGUMENTS = ("pretrained", "batch_size", "device")


@register_model("m6")
class M6LM(TemplateLM):
    """A run or exported model as a language model: empty source; context and continuation are the target.

    This is the objective ``language_modelling``. Probabilities are over the whole vocabulary, image codes included.

    Args:
        pretrained: folder of a run, or a folder written by ``m6 export``.
        batch_size: rows of a forward pass.
        device: PyTorch's name of a device; None: a GPU if there is one.

    Raises:
        UserError: the folder holds no model, or an argument is unknown or invalid.
    """

    def __init__(
        self, pretrained: str | Path, batch_size: int | str = 16, device: str | None = None, **unknown: Any
    ) -> None:
        super().__init__()
        for name in unknown:
            raise UserError(f"{name}: M6LM knows no such argument{nearest(name, _ARGUMENTS)}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UserError(f'batch_size "{batch_size}": expected a whole number of at least 1')
        self.model, self.processor = load_run_model(Path(pretrained), _usable_device(device))
        self.batch_size = int(batch_size)

    @property
    def eot_token_id(self) -> int:
        """The id of ``<eos>``."""
        return self.model.config.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id of ``<bos>``, the first token of every target."""
        return self.model.config.bos_token_id

    @property
    def max_length(self) -> int:
        """The most tokens of context and continuation together."""
        return self.model.config.max_position_embeddings

    @property
    def tokenizer_name(self) -> str:
        """The fingerprint of the tokenizer."""
        return self.processor.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes a text, without special tokens."""
        return self.processor.tokenizer.encode_ids(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        # Encoded separately, as a prompt in generation. The harness would encode the joined text and cut the ids at the
        # length of the context. But SentencePiece may merge characters across the border, so an answer may be left
        # without a token.
        return self.tok_encode(context), self.tok_encode(continuation)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores continuations.

        Args:
            requests: (texts, ids of the context, ids of the continuation). A context is cut at its beginning to the
                model's length.

        Returns:
            For each request the log-likelihood of the continuation in nats, and whether greedy decoding produces it.
        """
        bos, pad = self.prefix_token_id, self.model.config.pad_token_id
        # The last token is only predicted, never an input. This leaves room for <bos>.
        rows = [
            ([token for token in context if token != bos] + continuation)[-self.max_length :]
            for _, context, continuation in requests
        ]
        counts = [min(len(row), len(request[2])) for row, request in zip(rows, requests, strict=True)]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for begin in tqdm(range(0, len(order), self.batch_size), disable=disable_tqdm or None, desc="log-likelihoods"):
            part = order[begin : begin + self.batch_size]
            length = len(rows[part[0]])
            inputs = torch.tensor([[bos, *rows[i][:-1]] + [pad] * (length - len(rows[i])) for i in part])
            mask = torch.tensor([[1] * len(rows[i]) + [0] * (length - len(rows[i])) for i in part])
            device = self.model.device
            logits = self.model(inputs.to(device), attention_mask=mask.to(device)).logits
            for i, row_logits in zip(part, logits, strict=True):
                first, last = len(rows[i]) - counts[i], len(rows[i])
                targets = torch.tensor(rows[i][first:], device=device)
                log_probabilities = row_logits[first:last].double().log_softmax(-1)
                chosen = log_probabilities.gather(1, targets[:, None])
                scores[i] = float(chosen.sum()), bool((log_probabilities.argmax(-1) == targets).all())
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text in nats. Long texts are cut into disjoint windows."""
        windows: list[Request] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            # One position is for <bos>, the first token of every window.
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1)
            for context, continuation in map(make_disjoint_window, pairs):
                windows.append((("", text), context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues texts up to the first of the strings ``until``. Long contexts are cut at their beginning."""
        return [self._continue(*request.args) for request in tqdm(requests, disable=disable_tqdm or None, desc="texts")]

    def _continue(self, context: str, options: dict[str, Any]) -> str:
        chosen: dict[str, Any] = dict(normalize_gen_kwargs(options, _NEW_TOKENS))
        until = chosen.pop("until")
        new_tokens = min(chosen.pop("max_gen_toks"), self.max_length // 2)
        if not chosen["do_sample"]:
            chosen.pop("temperature", None)
        tokenizer = self.processor.tokenizer
        room = self.max_length - new_tokens
        prompt = str(tokenizer.decode(self.tok_encode(context)[-room:]))
        # A character cut between its byte tokens is decoded to replacement characters. These take more tokens.
        while len(self.tok_encode(prompt)) > room:
            prompt = prompt[1:]
        [text] = continue_text(self.model, self.processor, [prompt], max_new_tokens=new_tokens, **chosen)
        text = text.removeprefix(prompt)
        return text[: min((place for stop in until if stop and (place := text.find(stop)) >= 0), default=len(text))]


def _usable_device(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without CUDA
        raise UserError(f'device "{name}": PyTorch cannot use it: {error}') from None


OWN_TASKS = ("m6_news", "m6_reviews")
_FOLDER = Path(__file__).parent / "tasks"


def write_scores(
    folder: Path, data: Path | None, tasks: Sequence[str], out: Path, batch_size: int, max_rows: int | None
) -> str:
    """Scores a model and writes the scores as JSON.

    Args:
        folder: folder of a run, or a folder written by ``m6 export``.
        data: the data folder of ``OWN_TASKS``.
        tasks: names of ``OWN_TASKS`` or of the harness's own tasks (with data from the Hub).
        out: the JSON file.
        batch_size: rows of a forward pass.
        max_rows: most rows of each task; None: all.

    Returns:
        A table in Markdown.

    Raises:
        UserError: a task is unknown, its data is missing, or the folder holds no model.
    """
    own = [name for name in tasks if name in OWN_TASKS]
    if own and data is None:
        raise UserError(f'{own[0]} needs --data, a folder made by "m6 data build reviews inews"')
    for name in tasks:  # checked first: reading the harness's hundreds of tasks takes long
        if name.startswith("m6_") and name not in OWN_TASKS:
            raise UserError(f"{name}: no such task{nearest(name, OWN_TASKS)}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(
        include_path=str(_FOLDER), include_defaults=len(own) < len(tasks), metadata={"data": str(data)}
    )
    for name in tasks:
        if name not in manager.all_tasks:
            raise UserError(f"{name}: no such task{nearest(name, manager.all_tasks)}")
    model = M6LM(folder, batch_size)
    try:
        results = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, limit=max_rows, log_samples=False
        )
    except OSError as error:  # no network, no such data set, or no account for it
        raise UserError(f"{', '.join(tasks)}: the data cannot be read: {' '.join(str(error).split())}") from None
    assert results is not None, "only other ranks get none"
    document = {
        "model": str(folder),
        "tokenizer": model.tokenizer_name,
        "lm_eval": lm_eval.__version__,
        "versions": results["versions"],
        "rows": {name: number["effective"] for name, number in results["n-samples"].items()},
        "scores": {name: dict(_scores(values)) for name, values in results["results"].items()},
    }
    write_json(out, document)
    cells = [
        [task, f"{document['rows'].get(task, 0):,}", metric, f"{value:.4f}"]
        for task, scores in document["scores"].items()
        for metric, value in scores.items()
    ]
    return markdown_table(["task", "rows", "metric", "value"], cells, "lrlr")


def _scores(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of one task, such as ``acc`` and ``acc_stderr``; the harness calls them ``acc,none`` and so on."""
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if comma and isinstance(value, int | float):
            yield metric if filtered == "none" else key, float(value)
