"""``m6 downstream``: tables of a fine-tuned run's scores on the test split."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from m6.checkpoints.loading import load_run_model
from m6.config.run import RunConfig, load_config
from m6.data.manifest import Manifest
from m6.data.mixture import permuted
from m6.data.objectives import max_text_tokens, source_kind
from m6.data.reader import open_split
from m6.data.weights import source_weights
from m6.errors import UserError
from m6.evaluation.downstream import captions, classification, matching
from m6.evaluation.downstream.classification import LabelledTexts
from m6.evaluation.downstream.held_out import Rows, held_out
from m6.evaluation.downstream.neighbours import nearest_pictures
from m6.files import write_text
from m6.formatting import markdown_table
from m6.generation.captioning import caption
from m6.model.modeling import M6ForConditionalGeneration
from m6.runs.processes import default_device
from m6.tokenizers.processor import M6Processor, decode_picture

TASKS = ("image_captioning", "text_classification", "image_text_matching", "visual_question_answering")
CAPTION_TOKENS = 48


@dataclass(frozen=True)
class _Subject:
    """A model to evaluate, and the data that it is evaluated on."""

    model: M6ForConditionalGeneration
    processor: M6Processor
    config: RunConfig
    manifest: Manifest
    max_rows: int

    def rows(self, source: str, split: str = "test") -> list[dict[str, Any]]:
        """Returns the rows of a split; of the test split ``max_rows`` in a fixed random order."""
        data = open_split(self.manifest, source, split)
        if split != "test":
            return list(data)
        # The same rows for every model, so scores are comparable.
        return [data[permuted(index, len(data), key=0)] for index in range(min(self.max_rows, len(data)))]

    def max_tokens(self, objective: str) -> int:
        return max_text_tokens(objective, self.config.m6.data.sequence_length, self.config.model.num_patches)


def write_downstream(run_dir: Path, out: Path, max_rows: int) -> Path:
    """Evaluates every downstream task that a run was trained on, and writes the tables.

    Test rows that training holds are left out, and counted below the table.

    Args:
        run_dir: a run with a complete checkpoint; its data folder must still exist.
        out: the Markdown file to write.
        max_rows: maximum number of test rows of each source.

    Returns:
        ``out``.

    Raises:
        UserError: the folder is not a run, its data are missing, or none of its objectives is a downstream task.
    """
    config = load_config(run_dir / "config.json")
    tasks = [name for name in TASKS if config.m6.objectives.of(name).weight > 0]
    if not tasks:
        raise UserError(f"{run_dir}: none of its objectives is a downstream task; those are {', '.join(TASKS)}")
    model, processor = load_run_model(run_dir, default_device())
    manifest = Manifest.load(config.m6.data.path)
    subject = _Subject(model, processor, config, manifest, max_rows)
    draw = {
        "image_captioning": _captioning,
        "text_classification": _classification,
        "image_text_matching": _matching,
        "visual_question_answering": _answering,
    }
    parts = [f"# Downstream tasks of {run_dir.absolute().name}"]
    for task in tasks:
        for source in source_weights(manifest, "train", config.m6.data.sources):
            if manifest.sources[source].kind == source_kind(task) and manifest.split(source, "test").rows:
                training = subject.rows(source, "train")
                tested = held_out(subject.rows(source), training)
                parts += filter(None, [draw[task](subject, source, tested.rows, training), tested.remark])
    write_text(out, "\n\n".join(parts) + "\n")
    return out


def _captioning(subject: _Subject, source: str, rows: Rows, training: Rows) -> str:
    pictures = [Image.open(io.BytesIO(row["image"])) for row in rows]
    references = [row["text"] for row in rows]
    generated = caption(
        subject.model, subject.processor, pictures, num_beams=1, max_new_tokens=CAPTION_TOKENS, do_sample=False
    )
    systems = {
        "this model": generated,
        "caption of the nearest training picture": _neighbour_captions(rows, training),
        "commonest training caption": [captions.most_frequent([row["text"] for row in training])] * len(rows),
    }
    lines = []
    for name, texts in systems.items():
        scores = captions.score_captions(texts, references)
        lines.append([name, f"{scores.chrf:.1f}", f"{scores.bleu:.1f}", f"{scores.exact:.1%}"])
    title = f"## Captioning: {source}, {len(rows)} test pictures"
    return f"{title}\n\n{markdown_table(['captions', 'chrF', 'BLEU', 'equal to the reference'], lines)}"


def _classification(subject: _Subject, source: str, rows: Rows, training: Rows) -> str:
    test, train = _labelled(rows), _labelled(training)
    labels = sorted(set(train.labels))
    max_tokens = subject.max_tokens("text_classification")
    predictions = {
        "this model": classification.predict_by_likelihood(
            subject.model, subject.processor, test.texts, labels, max_tokens
        ),
        "TF-IDF and logistic regression": classification.predict_by_word_counts(
            train, _labelled(subject.rows(source, "validation")), test.texts
        ),
        "commonest training label": [captions.most_frequent(train.labels)] * len(test.texts),
    }
    lines = []
    for name, predicted in predictions.items():
        scores = classification.score_labels(predicted, test.labels)
        lines.append([name, f"{scores.accuracy:.1%}", f"{scores.macro_f1:.3f}"])
    title = f"## Classification: {source}, {len(test.texts):,} test texts of {len(labels)} labels"
    return f"{title}\n\n{markdown_table(['labels', 'accuracy', 'macro F1'], lines)}"


def _matching(subject: _Subject, source: str, rows: Rows, training: Rows) -> str:
    texts = sorted({row["text"] for row in rows})
    # Several pictures can have the same caption; each of them is relevant to it.
    relevant = np.array([[row["text"] == text for text in texts] for row in rows])
    pictures = [decode_picture(row["image"], subject.config.model.image_size) for row in rows]
    max_tokens = subject.max_tokens("image_text_matching")
    by_model = matching.match_by_model(subject.model, subject.processor, pictures, texts, max_tokens)
    by_neighbour = matching.match_by_neighbour(_neighbour_captions(rows, training), texts)
    systems = {
        "this model": matching.score_matches(by_model, relevant),
        "caption of the nearest training picture": matching.score_matches(by_neighbour, relevant),
        "random order (expected)": matching.chance(relevant),
    }
    lines = [
        [name, *(f"{value:.1%}" for value in (*recalls.text_to_picture, *recalls.picture_to_text))]
        for name, recalls in systems.items()
    ]
    header = [f"{way} R@{k}" for way in ("text to picture", "picture to text") for k in matching.RANKS]
    title = f"## Matching: {source}, {len(rows)} test pictures, {len(texts)} captions"
    return f"{title}\n\n{markdown_table(['order by', *header], lines)}"


def _answering(subject: _Subject, source: str, rows: Rows, training: Rows) -> str:
    questions, answers = [row["question"] for row in rows], [row["answer"] for row in rows]
    candidates = sorted({row["answer"] for row in training})
    pictures = [decode_picture(row["image"], subject.config.model.image_size) for row in rows]
    commonest = captions.most_frequent([row["answer"] for row in training])
    by_question: dict[str, list[str]] = {}
    for row in training:
        by_question.setdefault(row["question"], []).append(row["answer"])
    predictions = {
        "this model": classification.predict_by_likelihood(
            subject.model,
            subject.processor,
            questions,
            candidates,
            subject.max_tokens("visual_question_answering"),
            pictures,
        ),
        "commonest answer to the question": [
            captions.most_frequent(by_question.get(question, [commonest])) for question in questions
        ],
        "commonest answer": [commonest] * len(rows),
    }
    lines = []
    for name, predicted in predictions.items():
        lines.append([name, f"{classification.score_labels(predicted, answers).accuracy:.1%}"])
    title = f"## Questions: {source}, {len(rows):,} test questions of {len(candidates)} answers"
    return f"{title}\n\n{markdown_table(['answers', 'accuracy'], lines)}"


def _neighbour_captions(rows: Rows, training: Rows) -> list[str]:
    nearest = nearest_pictures([row["image"] for row in rows], [row["image"] for row in training])
    return [training[index]["text"] for index in nearest.tolist()]


def _labelled(rows: Rows) -> LabelledTexts:
    return LabelledTexts([row["text"] for row in rows], [row["answer"] for row in rows])
