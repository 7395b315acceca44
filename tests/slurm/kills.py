"""kill -9 of a whole step at random moments of one run, and what it cost each time."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tests.slurm.run import ClusterRun

INTERVAL = 20
# In this order: two attempts without a new checkpoint end a run, as they should, and a kill while starting leaves none.
MOMENTS = ("writing", "starting", "training")


@dataclass
class Kill:
    """One kill.

    Attributes:
        moment: what was seen just before it, which may not be what was aimed at: "starting", before the attempt's
            first step; "writing", while a checkpoint was incomplete; "training".
        time: of the kill, in seconds since 1970.
        step: the last step whose metrics were written.
        checkpoint: the newest complete checkpoint when all ranks were gone; 0 if there was none.
        resumed_at: the step from which the next attempt went on.
        first_step_after_s: from the kill to the end of the next attempt's first step; None where that was killed
            before.
    """

    moment: str
    time: float
    step: int
    checkpoint: int
    resumed_at: int = 0
    first_step_after_s: float | None = None

    @property
    def lost_steps(self) -> int:
        return self.step - self.resumed_at


def steps_for(kills: int) -> int:
    """A run that is still under way after so many kills: an attempt leaves at most two more checkpoints."""
    return 2 * INTERVAL * (kills + 1)


def kill_at_random(run: ClusterRun, kills: int, seed: int) -> list[Kill]:
    """Kills all ranks of the run's step ``kills`` times, each moment in turn, and returns when its job is over."""
    rng = random.Random(seed)
    done: list[Kill] = []
    for index, aim in zip(range(kills), itertools.cycle(MOMENTS), strict=False):
        begin = time.time()
        run.wait_for_ranks()
        if aim == "starting":
            time.sleep(rng.uniform(0, 2))
        else:
            before = run.newest_checkpoint()
            run.wait_until(partial(_entry_since, run, begin), f"the first step of attempt {index + 1}")
            run.wait_until(partial(_has_newer, run, before), "a new checkpoint")
            if aim == "writing":
                run.wait_until(lambda: _incomplete(run), "a checkpoint in the making")
                time.sleep(rng.uniform(0, 0.05))
            else:
                target = run.step() + rng.randint(0, INTERVAL)
                run.wait_until(partial(_trains_at, run, target), f"step {target}")
        moment = "starting" if not _entry_since(run, begin) else "writing" if _incomplete(run) else "training"
        now = time.time()
        run.kill_all()
        if done and (first := _entry_since(run, done[-1].time)):
            done[-1].first_step_after_s = first["time"] - done[-1].time
        done.append(Kill(moment, now, run.step(), run.newest_checkpoint()))
    run.wait_until(lambda: _entry_since(run, done[-1].time), "the first step after the last kill")
    done[-1].first_step_after_s = _entry_since(run, done[-1].time)["time"] - done[-1].time
    run.wait_for_end()
    _fill_in_resumes(run, done)
    return done


def summary(kills: list[Kill]) -> dict[str, Any]:
    """The figures of a soak."""
    return {
        "kills": len(kills),
        "moments": {name: sum(kill.moment == name for kill in kills) for name in MOMENTS},
        "checkpoint_interval_steps": INTERVAL,
        "lost_steps_max": max(kill.lost_steps for kill in kills),
        "each": [{**asdict(kill), "lost_steps": kill.lost_steps} for kill in kills],
    }


def _fill_in_resumes(run: ClusterRun, kills: list[Kill]) -> None:
    said = f"resumed {run.root} at step "
    following = 0
    for kill, attempt in reversed(list(zip(kills, run.attempts()[1:], strict=True))):
        log = (attempt / "rank_00000.log").read_text(encoding="utf-8", errors="replace")
        # An attempt that was killed before it could resume left everything to the one after it.
        if said in log:
            following = int(log.split(said)[1].split()[0])
        elif kill.checkpoint == 0:
            following = 0
        kill.resumed_at = following


def _entry_since(run: ClusterRun, since: float) -> dict[str, Any]:
    """The first line of metrics that was written after ``since``, if that was not long ago; empty if there is none."""
    return next((entry for entry in run.entries(last_bytes=2**17) if entry["time"] > since), {})


def _has_newer(run: ClusterRun, checkpoint: int) -> bool:
    return run.newest_checkpoint() > checkpoint


def _trains_at(run: ClusterRun, step: int) -> bool:
    """Whether the run is at this step, or later, and writes no checkpoint."""
    return run.step() >= step and not _incomplete(run)


def _incomplete(run: ClusterRun) -> bool:
    folders = (run.root / "checkpoints").glob("step_*")
    return any(not (folder / "manifest.json").exists() for folder in folders)
