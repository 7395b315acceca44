"""``m6 downstream``: the tasks, and tables of a fine-tuned run's scores on the test split.

Each task scores a model and its baselines on the same test rows. Test rows also in the training data are left out: a
score on them would measure memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from m6.checkpoints.loading import load_run_model
from m6.config.run import RunConfig, load_config
from m6.data.manifest import Manifest
from m6.data.objectives import BadRow, Example, Sample, make_example, max_text_tokens, source_kind
from m6.data.order import permuted
from m6.data.overlap import Contents
from m6.data.reader import open_split
from m6.data.weights import source_weights
from m6.errors import UserError
from m6.evaluation import metrics
from m6.evaluation.held_out import describe_other_training
from m6.evaluation.metrics import Estimate, LabelledTexts, bootstrap, nearest_pictures, share
from m6.files import write_json, write_text
from m6.formatting import markdown_table
from m6.generation.captioning import caption, write_targets
from m6.model.modeling import M6ForConditionalGeneration
from m6.runs.processes import default_device
from m6.tokenizers.pictures import decode_picture
from m6.tokenizers.processor import M6Processor

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class HeldOut:
    """The rows to score.

    Attributes:
        rows: test rows without a counterpart in training; all test rows if training has a counterpart of every one.
        remark: a note for the report on left-out rows; empty if there are none.
    """

    rows: list[dict[str, Any]]
    remark: str


def held_out(rows: Rows, training: Rows) -> HeldOut:
    """Leaves out test rows with a group, an image or (in rows without an image) a text of the training rows.

    ``m6.data.overlap`` compares them and also finds resized or recompressed images.
    """
    own = _contents(rows)
    shared = own.shared_with(_contents(training))
    # An image is unseen even if its caption occurs in training.
    seen = shared["group"] | shared["picture"] | (shared["text"] & ~own.has_picture)
    left_out = int(seen.sum())
    if left_out == len(rows):
        return HeldOut(
            list(rows), "Training holds the picture, text or group of every test row: the scores measure memory."
        )
    remark = f"{left_out} of {len(rows)} test rows are left out: training holds their picture, text or group."
    return HeldOut([row for row, known in zip(rows, seen, strict=True) if not known], remark if left_out else "")


def _contents(rows: Rows) -> Contents:
    contents = Contents()
    for row in rows:
        contents.add(row["group"], row["text"], row["image"], row["answer"])
    return contents


CAPTION_TOKENS = 48  # least limit of a caption; raised to the longest reference
THIS_MODEL = "this model"
Scores = dict[str, dict[str, Estimate]]  # by system and metric


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, and its evaluation data."""

    model: M6ForConditionalGeneration
    processor: M6Processor
    config: RunConfig
    manifest: Manifest
    max_rows: int

    def rows(self, source: str, split: str = "test") -> Rows:
        """Returns the rows of a split, read lazily; for the test split, ``max_rows`` rows in a random order."""
        data = open_split(self.manifest, source, split)
        if split != "test":
            return data
        # A fixed key gives the same rows for every model, so scores are comparable.
        return [data[permuted(index, len(data), key=0)] for index in range(min(self.max_rows, len(data)))]

    def max_tokens(self, objective: str) -> int:
        """Returns the length of a text after the cut in training, in tokens."""
        return max_text_tokens(objective, self.config.m6.data.sequence_length, self.config.model.num_patches)

    def pictures(self, rows: Rows) -> list[np.ndarray]:
        """Returns the rows' images, uint8 [image_size, image_size, 3] each."""
        return [decode_picture(row["image"], self.config.model.image_size) for row in rows]


@dataclass(frozen=True)
class Task:
    """A downstream task.

    Attributes:
        title: heading in the report, with ``{}`` for the source and the number of rows.
        score: (model and data, source, test rows, training rows) -> scores.
    """

    title: str
    score: Callable[[Subject, str, Rows, Rows], Scores]


def _captioning(subject: Subject, source: str, rows: Rows, training: Rows) -> Scores:
    pictures = [Image.open(io.BytesIO(row["image"])) for row in rows]
    longest = max(len(subject.processor.tokenizer.encode_ids(row["text"])) for row in rows)
    most = min(max(CAPTION_TOKENS, longest), subject.max_tokens("image_captioning"))
    generated = caption(
        subject.model, subject.processor, pictures, num_beams=1, max_new_tokens=most + 1, do_sample=False
    )
    systems = {
        THIS_MODEL: generated,
        "caption of the nearest training picture": _neighbour_captions(rows, training),
        "commonest training caption": [metrics.most_frequent([row["text"] for row in training])] * len(rows),
    }
    # Characters outside the tokenizer's vocabulary, such as full-width digits, must not change the scores of any
    # system.
    writable = subject.processor.tokenizer.writable
    references = [writable(row["text"]) for row in rows]
    return {name: _caption_scores([*map(writable, texts)], references) for name, texts in systems.items()}


def _caption_scores(written: Sequence[str], references: Sequence[str]) -> dict[str, Estimate]:
    def of(metric: Callable[[Sequence[str], Sequence[str]], float]) -> Estimate:
        return bootstrap(len(written), lambda index: metric(*(([t[i] for i in index]) for t in (written, references))))

    exact = [a == b for a, b in zip(written, references, strict=True)]
    return {"chrF": of(metrics.chrf), "BLEU": of(metrics.bleu), "equal to the reference": share(exact)}


def _classification(subject: Subject, source: str, rows: Rows, training: Rows) -> Scores:
    settings = subject.config.m6.objectives.text_classification
    test, train = (_labelled(part, settings.with_context) for part in (rows, training))
    if len(set(train.labels)) < 2:
        raise UserError(f'{source}: all training rows have the label "{train.labels[0]}"; expected two or more labels')
    selecting = subject.rows(source, "validation") if subject.manifest.split(source, "validation").rows else []
    validation = _labelled(selecting, settings.with_context)
    predictions = {
        THIS_MODEL: metrics.predict_by_likelihood(
            subject.model,
            subject.processor,
            [row["text"] for row in rows],
            sorted(set(train.labels)),
            subject.max_tokens("text_classification"),
            contexts=[row["context"] for row in rows] if settings.with_context else None,
        ),
        "TF-IDF and logistic regression": metrics.predict_by_word_counts(train, validation, test.texts),
        "commonest training label": [metrics.most_frequent(train.labels)] * len(rows),
    }
    return {name: _label_scores(predicted, test.labels) for name, predicted in predictions.items()}


def _label_scores(predicted: Sequence[str], labels: Sequence[str]) -> dict[str, Estimate]:
    own, true = np.array(predicted), np.array(labels)
    return {
        "accuracy": share(own == true),
        "macro F1": bootstrap(len(true), lambda index: metrics.macro_f1(own[index], true[index])),
    }


def _matching(subject: Subject, source: str, rows: Rows, training: Rows) -> Scores:
    # An image can have several captions, and a caption several images: all their pairs are correct.
    pairs = {(row["image"], row["text"]) for row in rows}
    rows = list({row["image"]: row for row in rows}.values())
    texts = sorted({text for _, text in pairs})
    relevant = np.array([[(row["image"], text) in pairs for text in texts] for row in rows])
    max_tokens = subject.max_tokens("image_text_matching")
    by_model = metrics.match_by_model(subject.model, subject.processor, subject.pictures(rows), texts, max_tokens)
    by_neighbour = metrics.match_by_neighbour(_neighbour_captions(rows, training), texts)
    scores: Scores = {name: {} for name in (THIS_MODEL, "caption of the nearest training picture")}
    scores["random order (expected)"] = {}
    for way, turn in (("text to picture", np.transpose), ("picture to text", np.asarray)):
        for k in metrics.RANKS:
            for name, own in zip(scores, (by_model, by_neighbour), strict=False):
                scores[name][f"{way} R@{k}"] = share(metrics.found_at(turn(own), turn(relevant), k))
            expected = metrics.chance(turn(relevant), k)
            scores["random order (expected)"][f"{way} R@{k}"] = Estimate(expected, is_share=True)
    return scores


def _answering(subject: Subject, source: str, rows: Rows, training: Rows) -> Scores:
    questions, answers = [row["question"] for row in rows], [row["answer"] for row in rows]
    candidates = sorted({row["answer"] for row in training})
    commonest = metrics.most_frequent([row["answer"] for row in training])
    by_question: dict[str, list[str]] = {}
    for row in training:
        by_question.setdefault(row["question"], []).append(row["answer"])
    max_tokens = subject.max_tokens("visual_question_answering")
    predictions = {
        THIS_MODEL: metrics.predict_by_likelihood(
            subject.model, subject.processor, questions, candidates, max_tokens, pictures=subject.pictures(rows)
        ),
        "commonest answer to the question": [
            metrics.most_frequent(by_question.get(question, [commonest])) for question in questions
        ],
        "commonest answer": [commonest] * len(rows),
    }
    return {
        name: {"accuracy": share([own == answer for own, answer in zip(predicted, answers, strict=True)])}
        for name, predicted in predictions.items()
    }


def _continuing(subject: Subject, source: str, rows: Rows, training: Rows) -> Scores:
    tokenizer, max_tokens = subject.processor.tokenizer, subject.max_tokens("text_continuation")
    examples = [made for row in rows if (made := _continuation_example(subject, row, max_tokens)) is not None]
    if not examples:
        raise UserError(f"{source}: none of {len(rows)} test texts has two sentences, of which the second is written")
    decode = tokenizer.decode
    characters = np.array([len(str(decode(example.target_ids))) for example in examples])
    texts = [tokenizer.encode_ids(row["text"], max_tokens) for row in training]
    nats = {
        THIS_MODEL: metrics.nats_by_model(subject.model, subject.processor, examples),
        **metrics.nats_by_ngrams(texts, examples, tokenizer, subject.config.model.vocab_size),
    }

    def per_character(own: np.ndarray) -> Estimate:
        return bootstrap(len(own), lambda index: float(own[index].sum() / characters[index].sum()))

    scores = {name: {"nats per character": per_character(own)} for name, own in nats.items()}

    def line_length(ids: Sequence[int]) -> int | None:
        return metrics.line_length(str(decode(ids)))

    # A first half of only the heading has no lines, so there is no form to keep.
    verse = [e for e in examples if line_length([*e.source_ids, *e.target_ids]) and line_length(e.source_ids)]
    if verse:
        sources = [example.source_ids for example in verse]
        written = write_targets(subject.model, subject.processor, sources, max_new_tokens=max_tokens, do_sample=False)
        kept = [metrics.line_length(text) == line_length(source) for text, source in zip(written, sources, strict=True)]
        scores[THIS_MODEL]["verse that keeps its form"] = share(kept)
    return scores


def _continuation_example(subject: Subject, row: Mapping[str, Any], max_tokens: int) -> Example | None:
    sample = Sample(id=row["id"], text=row["text"])
    try:
        return make_example(
            "text_continuation",
            sample,
            np.random.default_rng(0),
            subject.processor.tokenizer,
            subject.config.m6.objectives,
            max_tokens,
        )
    except BadRow:
        return None


def _neighbour_captions(rows: Rows, training: Rows) -> list[str]:
    nearest = nearest_pictures([row["image"] for row in rows], (row["image"] for row in training))
    return [training[index]["text"] for index in nearest.tolist()]


def _labelled(rows: Rows, with_context: bool) -> LabelledTexts:
    texts = [f"{row['text']}\n{row['context'] or ''}" if with_context else row["text"] for row in rows]
    return LabelledTexts(texts, [row["answer"] for row in rows])


TASKS: dict[str, Task] = {
    "image_captioning": Task("Captioning: {} test pictures", _captioning),
    "text_classification": Task("Classification: {} test texts", _classification),
    "image_text_matching": Task("Matching: {} test pictures", _matching),
    "visual_question_answering": Task("Questions: {} test questions", _answering),
    "text_continuation": Task("Continuation: {} test texts", _continuing),
}


def write_downstream(run_dir: Path, out: Path, max_rows: int) -> Path:
    """Evaluates every downstream task of a run; writes Markdown tables, and the same data as a JSON file next to them.

    Test rows also in training are left out, and rows beyond ``max_rows`` are not read. A note below the table counts
    both.

    Args:
        run_dir: a run with a complete checkpoint; its data folder must still exist.
        out: the Markdown file to write.
        max_rows: maximum number of test rows of each source.

    Returns:
        ``out``.

    Raises:
        UserError: the folder is not a run, its data are missing or have no test rows, or none of its objectives is a
            downstream task.
    """
    config = load_config(run_dir / "config.json")
    tasks = [name for name in TASKS if config.m6.objectives.of(name).weight > 0]
    if not tasks:
        raise UserError(f"{run_dir}: none of its objectives is a downstream task; those are {', '.join(TASKS)}")
    model, processor = load_run_model(run_dir, default_device())
    manifest = Manifest.load(config.m6.data.path)
    subject = Subject(model, processor, config, manifest, max_rows)
    parts = [f"# Downstream tasks of {run_dir.absolute().name}"]
    records: list[dict[str, Any]] = []
    for name in tasks:
        for source in source_weights(manifest, "train", config.m6.data.sources):
            if manifest.sources[source].kind == source_kind(name) and manifest.split(source, "test").rows:
                training, read = subject.rows(source, "train"), subject.rows(source)
                tested = held_out(read, training)
                scores = TASKS[name].score(subject, source, tested.rows, training)
                parts.append(f"## {TASKS[name].title.format(f'{source}, {len(tested.rows):,}')}")
                rows = manifest.split(source, "test").rows
                limited = f"Read were {len(read):,} of {rows:,} test rows (--max-rows)." if len(read) < rows else ""
                parts += filter(None, [_table(scores), limited, tested.remark])
                counts = {"rows": len(tested.rows), "rows_read": len(read), "test_rows": rows}
                records.append({"task": name, "source": source, **counts, "scores": _plain(scores)})
    if not records:
        raise UserError(
            f'{manifest.folder}: split "test" has no rows of the sources that {", ".join(tasks)} read; build the data '
            "with a larger --test-share"
        )
    parts += filter(None, [describe_other_training(run_dir, manifest, [record["source"] for record in records])])
    parts.append("In brackets: 95 % confidence intervals over the test rows.")
    write_json(out.with_suffix(".json"), records)
    write_text(out, "\n\n".join(parts) + "\n")
    return out


def _table(scores: Scores) -> str:
    metrics = list(dict.fromkeys(metric for own in scores.values() for metric in own))
    lines = [[name, *(str(own.get(metric, "")) for metric in metrics)] for name, own in scores.items()]
    return markdown_table(["", *metrics], lines)


def _plain(scores: Scores) -> dict[str, Any]:
    return {system: {metric: vars(e) for metric, e in own.items()} for system, own in scores.items()}
