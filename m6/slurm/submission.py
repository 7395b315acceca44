"""Submits a run to Slurm, after checking its configuration against the job description.

It also checks, as far as one node can tell, whether a folder is on a shared file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from m6.config.checks import check_has_model, check_processes, check_world_size
from m6.config.run import RunConfig, load_config
from m6.errors import UserError
from m6.files import write_text
from m6.runs.directory import RunDirectory
from m6.runs.provenance import checkout, take_snapshot
from m6.slurm.job import JobDescription, load_job

_MOUNTS = Path("/proc/self/mountinfo")
# Network file systems, by their type in /proc/self/mountinfo (proc(5)).
_NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "wekafs",
    "glusterfs",
    "orangefs",
    "panfs",
)


def check_shared(key: str, folder: Path, shared_folders: list[str]) -> None:
    """Checks whether all nodes can see a folder.

    Args:
        key: the key or option of the folder, for messages.
        folder: the folder to check.
        shared_folders: folders shared by all nodes. If there are any, ``folder`` must be in one of them; otherwise it
            must be on a network file system.

    Raises:
        UserError: the folder is not shared.
    """
    resolved = folder.resolve()
    if shared_folders:
        if not any(resolved.is_relative_to(Path(shared).resolve()) for shared in shared_folders):
            raise UserError(
                f"{key} {folder}: not in a folder that all nodes share (shared_folders: {', '.join(shared_folders)})"
            )
        return
    kind = file_system_type(resolved)
    if kind.removeprefix("fuse.") not in _NETWORK:
        raise UserError(
            f"{key} {folder}: is on {kind or 'an unknown file system'}, which other nodes cannot see; choose a folder "
            "on a network file system, or list the folders that all nodes have alike in the job's shared_folders"
        )


def file_system_type(path: Path) -> str:
    """Returns the type of the file system of ``path``, such as ``lustre``; empty if it is not known."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return ""
    # The file system of a path is its longest mount point; of equal ones, the one mounted last.
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(b" - ")
        # Spaces in mount points are escaped as octal numbers; other bytes, of any encoding, are as they are.
        escaped = left.split(b" ")[4]
        mount = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), escaped))
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), os.fsdecode(right.split(b" ")[0])
    return kind


_SCRIPT = "scripts/slurm/pretrain.sbatch"


@dataclass(frozen=True)
class Submission:
    """A checked submission, not yet sent to Slurm.

    Attributes:
        config: configuration of the run.
        run: folder of the run.
        snapshot: folder for the copy of the code and configuration.
        options: options of sbatch. A later replacement of a job needs the same options.
        placement: further options of sbatch, not for replacements: dependency and array.
        jobs: number of jobs to submit; each waits for the one before.
        ranks_per_node: processes on a node.
        restart: the run begins again at step 0.
    """

    config: RunConfig
    run: Path
    snapshot: Path
    options: list[str]
    placement: list[str]
    jobs: int
    ranks_per_node: int
    restart: bool

    @property
    def command(self) -> list[str]:
        """The sbatch command of one job."""
        script = self.snapshot / _SCRIPT
        return ["sbatch", "--parsable", *self.options, *self.placement, str(script), str(self.snapshot / "config.json")]


def plan_submission(
    config_path: Path,
    overrides: tuple[str, ...],
    job_path: Path,
    run: Path,
    chain: int,
    array: int,
    init: Path | None = None,
    restart: bool = False,
) -> Submission:
    """Checks a run against a job description and makes the sbatch command. Nothing is written.

    Args:
        config_path: the run's JSON.
        overrides: ``key.path=value`` strings.
        job_path: JSON of the job description.
        run: folder of the run.
        chain: number of consecutive jobs; 1: a single job, requeueing itself.
        array: number of consecutive tasks of a job array; 0 for no array.
        init: run or exported model of the initial weights; None for a run from scratch.
        restart: begins again at step 0, see ``RunDirectory.restart``.

    Raises:
        UserError: the run cannot work with this job; the message names the contradicting values.
    """
    job = load_job(job_path)
    if init is None:
        config = load_config(config_path, overrides)
        if restart or not (run / "config.json").exists():
            check_has_model(config, config_path)
    else:
        from m6.checkpoints.finetuning import load_finetuning_config

        config = load_finetuning_config(config_path, init.absolute(), overrides)
    elastic = config.m6.elastic
    if elastic is None:
        check_world_size(config, job.world_size)
    elif not elastic.min_nodes <= job.nodes <= elastic.max_nodes:
        raise UserError(
            f"{job_path}: nodes is {job.nodes}, but m6.elastic goes from {elastic.min_nodes} to {elastic.max_nodes}"
        )
    check_processes(config, job.cpus_per_rank)
    run = Path(os.path.abspath(run))  # the job scripts use the same form: without "..", symbolic links are kept
    _check_run(config, run, job, restart)
    if chain > 1 and array:
        raise UserError(f"--chain {chain} and --array {array}: both make consecutive jobs; choose one")
    checkout()  # raises if the sources for the snapshot are missing
    # Jobs run a copy of the code: changes to the checkout while they wait or run have no effect on them.
    snapshot = run / "slurm" / "code" / time.strftime("%Y%m%d_%H%M%S")
    # Consecutive jobs replace requeueing: the next one continues the run.
    is_consecutive = chain > 1 or array > 0
    # Jobs of the same name run one after the other. The hash separates runs in different folders of the same name.
    name = f"m6_{run.name}_{hashlib.sha256(os.fsencode(run)).hexdigest()[:6]}"
    options = [
        f"--job-name={name}",
        f"--comment={run}",
        *job.options(None if elastic is None else (elastic.min_nodes, elastic.max_nodes)),
        f"--output={f'{run}/slurm/m6_{run.name}'.replace('%', '%%')}_{'%A_%a' if array else '%j'}.log",
        "--open-mode=append",
        "--no-requeue" if is_consecutive else "--requeue",
        f"--export=ALL,M6_ROOT={snapshot},RUN_DIR={run},M6_RANKS_PER_NODE={job.ranks_per_node}",
    ]
    # singleton: jobs with the same name and user run one after the other.
    placement = ["--dependency=singleton"]
    if array:
        placement.append(f"--array=1-{array}%1")
    return Submission(config, run, snapshot, options, placement, chain, job.ranks_per_node, restart)


def submit(submission: Submission) -> list[str]:
    """Takes the snapshot, submits the jobs and records them. A restart first moves the files of all earlier steps.

    Returns:
        The ids of the jobs.

    Raises:
        StorageError: another process trains the run to be restarted, or its folder cannot be written.
        UserError: sbatch is missing or fails. Jobs submitted before the failure stay in the queue and are recorded.
    """
    if shutil.which("sbatch") is None:
        raise UserError("sbatch: no such command; m6 submit needs Slurm, except with --dry-run")
    if submission.restart:
        run = RunDirectory(submission.run)
        run.lock.acquire()
        try:
            run.restart()
        finally:
            run.lock.release()
    take_snapshot(submission.snapshot, submission.config.document)
    (submission.run / "DONE").unlink(missing_ok=True)  # left if the run became longer: its job would end at once
    write_text(submission.run / "slurm" / "sbatch_options", "".join(f"{option}\n" for option in submission.options))
    jobs: list[str] = []
    try:
        for _ in range(submission.jobs):
            jobs.append(_sbatch(submission.command))
    finally:
        record = {"time": time.time(), "command": shlex.join(submission.command), "jobs": jobs}
        with (submission.run / "slurm" / "submissions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return jobs


def _check_run(config: RunConfig, run: Path, job: JobDescription, restart: bool) -> None:
    """Makes the checks of the job itself now, and not after days in the queue."""
    from m6.checkpoints.discovery import complete_checkpoints
    from m6.checkpoints.initial import check_start
    from m6.runs.data import data_warnings, open_data
    from m6.runs.trackers import check_trackers

    try:
        check_trackers(config.m6.logging, with_credentials=True)
    except UserError as error:
        print(f"warning: here {error}; the job ends with that, unless its cluster.env changes it", file=sys.stderr)
    if any(character in str(run) for character in ",\n\\"):
        raise UserError(
            f"{run}: Slurm's --export takes no folder with a comma or a line break in its name, and its --output none "
            "with a backslash"
        )
    folder = RunDirectory(run)
    folder.check(config)
    if folder.is_done(config.m6.training.total_steps) and not restart:
        raise UserError(f"{run / 'DONE'} exists: the run is finished; a larger m6.training.total_steps continues it")
    if (run / "STOP").exists():
        raise UserError(f"{run / 'STOP'} exists: a user stopped the run; remove the file")
    if job.nodes > 1:
        for key, path in _read_by_all_nodes(config, run).items():
            check_shared(key, path, job.shared_folders)
    if not restart and not complete_checkpoints(folder.checkpoints):
        folder.check_never_saved([])
    data = open_data(config)
    check_start(config, folder, data, restart)
    for problem in data_warnings(config, data):
        print(f"warning: {problem}", file=sys.stderr)


def _read_by_all_nodes(config: RunConfig, run: Path) -> dict[str, Path]:
    """The folders read by all ranks of a run, by their key or option."""
    data, init = config.m6.data, config.m6.init
    folders = {"--run-dir": run, "m6.data.path": data.path, "m6.data.tokenizer": data.tokenizer}
    if data.image_tokenizer is not None and Path(data.image_tokenizer).exists():  # else a name on the Hub
        folders["m6.data.image_tokenizer"] = Path(data.image_tokenizer)
    return folders if init is None else {**folders, "--init": init}


def _sbatch(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"sbatch refused: {' '.join(result.stderr.split())}")
    return result.stdout.strip().split(";")[0]  # --parsable prints "id" or "id;cluster"
