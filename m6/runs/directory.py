"""The run directory: the interface between the trainer, the job scripts and people.

RUN/config.json      the JSON of the run, as validated
RUN/provenance/      one folder per attempt: git commit and patch, command, hardware, environment, package versions
RUN/sources.json     the sources of the data with their licences, see m6/runs/data.py
RUN/initial.json     the run or model of the initial weights, see m6/checkpoints/provenance.py
RUN/captions.json    pieces and character pairs of all captions, if the run learns to draw, see m6/data/captions.py
RUN/metrics.jsonl    one line per log interval; a restart causes no duplicates and no gaps
RUN/bad_rows_rank_*  unusable rows of the data, by step; also without duplicates and gaps
RUN/samples/         images of fixed captions, by step
RUN/offload/         the memory of offloaded experts, see m6/training/offloading/report.py
RUN/nonfinite/       the batches of a step that was not finite and ended the run
RUN/fault.json       the last fault before the run returned to a checkpoint, see m6/training/faults.py
RUN/checkpoints/     see m6/checkpoints/format.py
RUN/progress         the last finished step and its time; touched while the run waits for a checkpoint
RUN/loading          touched while an attempt reads its checkpoint
RUN/DONE             the run is finished
RUN/FATAL            the run failed and another attempt would fail too; the file holds the reason
RUN/STOP             created by a person: save, then end
RUN/last_checkpoint  names the last complete checkpoint, to notice missing checkpoints
RUN/lock             held by the training process
RUN/SAVE             created by a person: save, then continue; removed when the checkpoint is complete
RUN/slurm/           files of the job scripts, see docs/guides/slurm.md

Some keys of a run's JSON must be equal in all attempts at the run. Lines of RUN/metrics.jsonl are checked where they
are read: a disk or a person may have changed them.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from m6.config.run import RunConfig
from m6.errors import StorageError, UserError
from m6.files import (
    atomic_path,
    cut_lines_after,
    parse_object,
    read_note,
    reading,
    sync,
    why_unwritable,
    write_json,
    write_text,
)
from m6.lock import FolderLock
from m6.renamed import with_new_keys
from m6.runs.provenance import record_attempt

# These sections may change between two attempts at a run: they set neither model, data order nor schedule.
_MAY_CHANGE = ("parallel", "communication", "elastic", "offload", "checkpoint", "logging", "evaluation", "samples")
_IDENTIFYING = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer", "fp16", "bf16",
    "torch_autocast",
)  # fmt: skip


def identity(document: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's JSON to be equal in all attempts at the run."""
    m6 = {key: value for key, value in document.get("m6", {}).items() if key not in _MAY_CHANGE}
    # In the following sections only keys of the run's layout may change, since they do not change its results.
    m6["offload"] = {"optimizer": (document.get("m6", {}).get("offload") or {}).get("optimizer")}
    training = m6.get("training", {}).items()
    # If a limit ended a run, a higher limit may continue it.
    layout = [
        *("ep_size", "total_steps", "activation_checkpointing", "overlap_micro_batches"),
        *("max_skipped_steps", "check_replicas_interval_steps"),
    ]
    m6["training"] = {key: value for key, value in training if key not in layout}
    data = m6.get("data", {}).items()
    m6["data"] = {key: value for key, value in data if key not in ("num_workers", "max_bad_row_share")}
    if m6.get("moe"):
        exchange = ("exchange", "ranks_per_node", "overlap_parts")
        m6["moe"] = {key: value for key, value in m6["moe"].items() if key not in exchange}
    if m6.get("pseudo_to_real"):
        m6["pseudo_to_real"] = {key: value for key, value in m6["pseudo_to_real"].items() if key != "stop_at_switch"}
    return {"m6": m6, **{key: document.get(key) for key in _IDENTIFYING}}


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """The first key at which two documents differ, with both values; empty if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            difference = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if difference:
                return difference
        return ""
    return "" if old == new else f"its {path} is {old!r}, this one's is {new!r}"


# Numbers in every line of an interval of steps.
_OF_INTERVAL = (
    "time", "samples_seen", "tokens_seen", "skipped_steps", "bad_rows", "step_time_s", "data_wait_s",
    "checkpoint_stall_s", "tokens_per_second", "samples_per_second", "memory_bytes",
)  # fmt: skip
_OR_NULL = ("loss", "aux_loss", "learning_rate", "grad_norm", "model_flops_per_second", "mfu")
_SECTIONS = ("objectives", "validation", "validation_by_source", "experts", "gradient_noise")


class Entry(dict[str, Any]):
    """A line, or a part of one. To read a missing key is an error: the file is damaged."""

    def __missing__(self, key: str) -> Any:
        raise UserError(f'metrics.jsonl: corrupt: an entry has no "{key}"')


def check_entry(entry: dict[str, Any]) -> Entry:
    """Checks the types of all known keys of a line.

    Raises:
        ValueError: a value is of another type.
    """
    if not isinstance(entry.get("step"), int):
        raise ValueError("not an object with a step")
    for key, value in entry.items():
        if key in _OF_INTERVAL and not _is_number(value):
            raise ValueError(f"{key} is {value!r:.80}, expected a number")
        if key in _OR_NULL and not (value is None or _is_number(value)):
            raise ValueError(f"{key} is {value!r:.80}, expected a number or null")
        if key in _SECTIONS:
            _check_section(key, value, 1 + (key == "validation_by_source"))
    return _with_keys(entry)


def _check_section(name: str, value: object, depth: int) -> None:
    """Checks an object of numbers, nulls or further objects; in ``experts``, of lists with an entry for each layer."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}, expected an object")
    for key, each in value.items():
        if name == "experts" and key == "sent_bytes":
            _check_section(f"experts.{key}", each, 1)
        elif name == "experts" and key != "prototypes":
            if not isinstance(each, list):
                raise ValueError(f"experts.{key} is {each!r:.80}, expected a list")
            of_layers = str if key == "loads" else (int, float, type(None))
            if not all(isinstance(layer, of_layers) for layer in each):
                raise ValueError(f"experts.{key} has an entry of another type")
        elif depth > 1 or name == "experts":
            _check_section(f"{name}.{key}" if name != "experts" else "prototypes", each, depth - 1)
        elif name != "prototypes" and not (_is_number(each) or (each is None and name != "gradient_noise")):
            raise ValueError(f"{name}.{key} is {each!r:.80}, expected a number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return Entry((key, _with_keys(each)) for key, each in value.items())
    return value


_LOADING_S = 10.0
_OPTIONAL = ("offload", "moe", "pseudo_to_real")  # ``identity`` reads keys of these sections
_BAD_ROWS, _STEP_OF_ROW = "bad_rows_rank_*.txt", re.compile(rb"step (\d{1,18}): ")
LAST_CHECKPOINT = "last_checkpoint"
"""The file with the name of the run's last complete checkpoint."""
PROGRESS = "progress"
"""The file touched by a running attempt: a sign of life."""
LOADING = "loading"
"""The file touched while an attempt reads its checkpoint. Reading may take longer than any step."""
SOURCES, INITIAL, CAPTIONS = "sources.json", "initial.json", "captions.json"
"""The files about the sources of the data, the origin of the initial weights, and the pieces and character pairs of the
captions."""
SAMPLES, OFFLOAD, NONFINITE = "samples", "offload", "nonfinite"
"""The folders of images by step, of the memory of offloaded experts, and of batches with values not finite."""
FAULT = "fault.json"
"""The file with the last fault, to recognise it when it occurs again."""
WANDB_ID, TENSORBOARD = "wandb_id", "tensorboard"
"""The file with the run's id in Weights & Biases, and the folder of TensorBoard's points."""


class RunDirectory:
    """The folder of one run. Only the main rank writes, and only while it holds ``lock``.

    Args:
        root: the run's folder; it need not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.metrics = root / "metrics.jsonl"
        self.lock = FolderLock(root / "lock", root)
        self._progress_time = self._loading_time = float("-inf")  # the first step is always written

    def check(self, config: RunConfig) -> None:
        """Checks whether ``config`` can be trained in this folder; writes nothing.

        Raises:
            UserError: the folder holds another run or other files, cannot be written, or ended as FATAL.
        """
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is a file; --run-dir takes a folder")
        recorded = self.root / "config.json"
        # The folder is listed before config.json is looked for: a starting attempt writes config.json first.
        foreign = self.root.is_dir() and not all(_precedes_config(path.name) for path in self.root.iterdir())
        if recorded.exists():
            old = _read_document(recorded)
            difference = first_difference(identity(old), identity(config.document))
            before, now = _total_steps(old), config.m6.training.total_steps
            if not difference and before is not None and now < before:
                difference = (
                    f"its m6.training.total_steps is {before}, this one's is {now}: a run can only become longer"
                )
            elif not difference and before != now and config.m6.data.max_epochs is not None:
                difference = (
                    f"its m6.training.total_steps is {before}, this one's is {now}, and m6.data.max_epochs shares the "
                    "rows out over all steps: a longer run would read others from the first step on"
                )
            if difference and self._has_trained():
                raise UserError(f"{self.root} already holds another run ({difference}); choose another --run-dir")
        elif foreign:
            raise UserError(f"{self.root} is not empty and holds no run (no config.json); choose another --run-dir")
        if reason := why_unwritable(self.root):
            raise UserError(f"{self.root} cannot be written: {reason}")
        if (self.root / "FATAL").exists():
            reason = read_note(self.root / "FATAL")
            raise UserError(f"{self.root} ended as FATAL: {reason}. Remove {self.root / 'FATAL'} to try again")

    def open(self, config: RunConfig, world_size: int, nodes: Sequence[str] = ()) -> None:
        """Creates the folder and records this attempt. If a finished run became longer, it removes DONE.

        Args:
            nodes: the name of the node of each rank, if it is known.

        Raises:
            StorageError: the folder cannot be written.
        """
        with self._writing():
            self.root.mkdir(parents=True, exist_ok=True)
            write_json(self.root / "config.json", config.document)
            if not self.is_done(config.m6.training.total_steps):
                (self.root / "DONE").unlink(missing_ok=True)
            attempts = self.root / "provenance"
            attempts.mkdir(exist_ok=True)
            record_attempt(_next_folder(attempts, "attempt_"), config, world_size, nodes)

    def is_done(self, total_steps: int) -> bool:
        """Whether the run has finished ``total_steps`` steps; it may have finished fewer before it became longer."""
        try:
            return int(read_note(self.root / "DONE")) >= total_steps
        except FileNotFoundError:
            return False
        except ValueError:  # a person's file
            return True

    def _has_trained(self) -> bool:
        """Whether an attempt reached a step. Before its first step a folder is free for another run."""
        return self.metrics.exists() or (self.root / PROGRESS).exists() or self.checkpoints.exists()

    def check_never_saved(self, problems: list[str]) -> None:
        """Raises UserError if the run once completed a checkpoint. Called when there is no whole checkpoint to resume.

        The checkpoints may lie on an unmounted disk, and a run must not begin anew unasked.

        Args:
            problems: of the existing checkpoints.
        """
        file = self.root / LAST_CHECKPOINT
        if file.exists():
            reasons = f" ({'; '.join(problems)})" if problems else ""
            raise UserError(
                f"{self.root} was saved as {read_note(file):.80}, but {self.checkpoints} holds no "
                f"whole checkpoint{reasons}: bring it back, or begin again at step 0 with --restart, which keeps what "
                "is there under another name"
            )

    def restart(self) -> None:
        """Moves the files of all steps so far to RUN/before_restart_NNN, so the run begins at step 0.

        Trackers begin anew, too: they would drop or mix up points of steps seen before. The record of the job scripts
        is also moved, since they would count old attempts from step 0 as new failures. Data and initial weights may be
        others from now on, so their records move as well.
        """
        of_steps = (PROGRESS, "DONE", LAST_CHECKPOINT, SAMPLES, OFFLOAD, NONFINITE, FAULT)
        others = (*of_steps, SOURCES, INITIAL, CAPTIONS, WANDB_ID, TENSORBOARD, "slurm/attempts.txt")
        kept = (self.metrics, self.checkpoints, *(self.root / name for name in others), *self.root.glob(_BAD_ROWS))
        folder = _next_folder(self.root, "before_restart_")
        with self._writing():
            folder.mkdir()
            for path in kept:
                if path.exists():
                    path.rename(folder / path.name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns an OSError, for example of a full disk, into a StorageError with the names of folder and file."""
        try:
            yield
        except OSError as error:
            file = f" ({error.filename})" if error.filename is not None else ""
            raise StorageError(f"{self.root} cannot be written: {error.strerror or error}{file}") from None

    def cut_metrics_after(self, step: int) -> list[int]:
        """Removes an incomplete last line and the metrics of later steps, since a resumed run repeats these steps.

        Returns:
            the numbers of damaged lines; the lines are moved to RUN/metrics.jsonl.damaged.
        """
        with self._writing():
            return cut_lines_after(self.metrics, step)

    def lost_metrics(self, step: int, interval_steps: int) -> str:
        """Says which steps before a checkpoint are missing in RUN/metrics.jsonl; empty if none is.

        Args:
            step: of the checkpoint.
            interval_steps: how many steps an entry covers.
        """
        entries = self.read_metrics(skip_damaged=True) if self.metrics.is_file() else []
        last = max((entry["step"] for entry in entries), default=0)
        if last + interval_steps > step:
            return ""
        state = f"ends at step {last}" if self.metrics.is_file() else "is missing"
        return f"{self.metrics} {state}, but the checkpoint is of step {step}: curves and reports lack what is between"

    def append_metrics(self, entry: dict[str, Any]) -> None:
        """Appends one line to RUN/metrics.jsonl; non-finite numbers become null."""
        with self._writing(), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_without_nonfinite(entry), ensure_ascii=False, allow_nan=False) + "\n")

    def sync_metrics(self) -> None:
        """Flushes RUN/metrics.jsonl to the disk, so no checkpoint is newer than the metrics before it."""
        if self.metrics.exists():
            sync(self.metrics)

    def read_metrics(self, skip_damaged: bool = False) -> list[dict[str, Any]]:
        """Reads RUN/metrics.jsonl; an incomplete last line is ignored.

        Raises:
            UserError: the file is missing, or a complete line is damaged and ``skip_damaged`` is false.
        """
        if not self.metrics.exists():
            raise UserError(f"{self.metrics}: no such file; is {self.root} the folder of a run?")
        entries: list[dict[str, Any]] = []
        text = self.metrics.read_bytes().decode("utf-8", "backslashreplace")
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            if not line.endswith("\n"):  # a writer is in the middle of this line, or died there
                continue
            try:
                entry = check_entry(parse_object(line))
            except ValueError as error:
                if skip_damaged:
                    continue
                raise UserError(f"{self.metrics}, line {number}: corrupt: {error}") from None
            entries.append(entry)
        return entries

    def list_bad_rows(self, rank: int, step: int, rows: Sequence[str]) -> None:
        """Appends unusable rows of the data to a file; each rank has its own file."""
        if rows:
            file = self.root / f"bad_rows_rank_{rank:05d}.txt"
            with self._writing(), file.open("a", encoding="utf-8") as lines:
                lines.writelines(f"step {step}: {row}\n" for row in rows)

    def cut_bad_rows_after(self, step: int) -> None:
        """Removes unusable rows of later steps from the files of all ranks, since a resumed run lists them again."""
        with self._writing():
            for file in self.root.glob(_BAD_ROWS):
                *lines, _ = file.read_bytes().split(b"\n")  # the part after the last line break is half-written
                steps = [_STEP_OF_ROW.match(line) for line in lines]
                kept = [found.string + b"\n" for found in steps if found is not None and int(found[1]) <= step]
                with atomic_path(file) as temporary:
                    temporary.write_bytes(b"".join(kept))

    def write_progress(self, step: int, total_steps: int) -> None:
        """Records the last finished step, at most once a second.

        The file is a sign of life. It is not flushed to the disk, because a flush would delay the training.
        """
        now = time.monotonic()
        if now - self._progress_time < 1.0 and step < total_steps:
            return
        self._progress_time = now
        with self._writing():
            temporary = self.root / ".progress.tmp"  # a reader never sees a half-written file
            entry = {"step": step, "total_steps": total_steps, "time": time.time()}
            try:
                temporary.write_text(json.dumps(entry) + "\n", encoding="utf-8")
                temporary.replace(self.root / PROGRESS)
            finally:
                temporary.unlink(missing_ok=True)  # of a full disk

    def show_loading(self) -> None:
        """Touches RUN/loading, at most every ten seconds, as a sign of life while the checkpoint is read."""
        now = time.monotonic()
        if now - self._loading_time >= _LOADING_S:
            self._loading_time = now
            with contextlib.suppress(OSError):  # a failing file system shows in the reading itself
                (self.root / LOADING).touch()

    def finish(self, step: int) -> None:
        """Writes RUN/DONE with the number of the last step."""
        with self._writing():
            write_text(self.root / "DONE", f"{step}\n")

    def fail(self, reason: str) -> None:
        """Writes RUN/FATAL with the reason; no later attempt starts while the file exists."""
        with self._writing():
            write_text(self.root / "FATAL", reason + "\n")

    def stop_requested(self) -> bool:
        """Whether a person created RUN/STOP."""
        return (self.root / "STOP").exists()

    def save_requested(self) -> bool:
        """Whether a person created RUN/SAVE."""
        return (self.root / "SAVE").is_file()

    def remove_save_request(self) -> None:
        """Removes RUN/SAVE. Its author sees from this that the checkpoint is complete."""
        (self.root / "SAVE").unlink(missing_ok=True)


def _next_folder(parent: Path, prefix: str) -> Path:
    """The folder with the largest number plus one, not the count: a person may have removed or copied some."""
    found = (re.fullmatch(rf"{prefix}(\d+)", path.name) for path in parent.glob(f"{prefix}*"))
    numbers = [int(match[1]) for match in found if match]
    return parent / f"{prefix}{max(numbers, default=-1) + 1:03d}"


def _read_document(path: Path) -> dict[str, Any]:
    with reading(path):
        text = path.read_bytes()
    try:
        document = parse_object(text)
        sections = document["m6"]
        needed = [sections, sections["training"], sections["data"], *(sections.get(name) or {} for name in _OPTIONAL)]
        if all(isinstance(section, dict) for section in needed):
            return with_new_keys(document)[0]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{path}: corrupt, or not the configuration of a run; choose another --run-dir")


def _total_steps(document: dict[str, Any]) -> int | None:
    total = document["m6"]["training"].get("total_steps")
    return total if isinstance(total, int) else None


def _without_nonfinite(value: Any) -> Any:
    """Replaces NaN and infinity by null, since JSON has no such numbers: skipped steps have them."""
    if isinstance(value, dict):
        return {key: _without_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _precedes_config(name: str) -> bool:
    """Whether a file may be older than config.json: of the job scripts, or of an attempt starting or killed early."""
    return name in ("slurm", "lock") or (name.startswith(".config.json.") and name.endswith(".tmp"))


def noise_scale(entries: Iterable[dict[str, Any]]) -> float | None:
    """The noise scale in samples: a ratio of means over lines, see ``m6.training.reporting.noise``.

    Args:
        entries: lines of metrics.jsonl.

    Returns:
        None without estimates, or if the estimate of the squared gradient is not positive: noise hides it.
    """
    found = [entry["gradient_noise"] for entry in entries if "gradient_noise" in entry]
    squared_gradient = sum(entry["squared_gradient"] for entry in found)
    return sum(entry["variance"] for entry in found) / squared_gradient if squared_gradient > 0 else None
