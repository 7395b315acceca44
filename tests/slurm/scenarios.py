"""What happens to the runs. Each function takes ``make_run`` and returns what a test judges."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.fixtures.pages import blocks, execute
from tests.slurm import kills
from tests.slurm.run import INTERVAL, MIDDLE, STEPS, ClusterRun, MakeRun

ROOT = Path(__file__).parents[2]
KILLS = 3  # one at each moment; scripts/benchmarks/slurm.py makes more
FIRST = ("random_kills", "long_left_alone", "lost_node")  # the longest: the others run beside them


def left_alone(make_run: MakeRun) -> ClusterRun:
    run = make_run("left_alone")
    run.submit()
    run.wait_for_end()
    return run


def stop_and_resume(make_run: MakeRun) -> tuple[ClusterRun, int]:
    run = make_run("stop_and_resume")
    run.submit()
    with run.held():
        step = run.step()
        run.ask_to_stop()
        run.wait_for_stop()
    run.wait_for_file("DONE")
    run.wait_for_end()
    return run, step


def stop_during_preflight(make_run: MakeRun) -> ClusterRun:
    run = make_run("stop_during_preflight", "export PREFLIGHT_HOOK='[[ -e $RUN_DIR/slurm/slept ]] || sleep 30'")
    run.submit()
    run.wait_for_attempt(1)
    run.wait_until((run.attempts()[0] / "preflight" / "clock").exists, "preflight")
    run.ask_to_stop()
    run.wait_for_stop()
    (run.root / "slurm" / "slept").touch()  # before the next attempt looks for it
    run.wait_for_file("DONE")
    run.wait_for_end()
    return run


def stop_while_starting(make_run: MakeRun) -> ClusterRun:
    run = make_run("stop_while_starting")
    run.submit()
    run.wait_for_ranks()
    run.ask_to_stop()
    run.wait_for_file("DONE")
    run.wait_for_end()
    return run


def time_limit(make_run: MakeRun) -> ClusterRun:
    """Slurm itself asks to stop, eight minutes before the job's limit, and up to one earlier.

    While it does, the run stands still, and the limit comes near only then: how fast the run is must not matter.
    """
    run = make_run("time_limit")
    run.submit(time_limit_min=60, signal_lead_s=480)
    with run.held():
        hours, minutes, _ = run.cluster.job_fields(run.job)["RunTime"].split(":")
        run.set_time_limit(60 * int(hours) + int(minutes) + 9)
        run.wait_for_stop()
        run.set_time_limit(60)  # for the next attempt: once is enough
    run.wait_for_file("DONE")
    run.wait_for_end()
    return run


def stopped_before_saving(make_run: MakeRun) -> ClusterRun:
    """Every attempt is stopped while it is in preflight."""
    run = make_run("stopped_before_saving", "export PREFLIGHT_HOOK='sleep 600' PREFLIGHT_TIMEOUT_S=600")
    run.submit()
    for attempt in (1, 2):
        run.wait_for_attempt(attempt)
        run.wait_until((run.attempts()[-1] / "preflight" / "clock").exists, "preflight")
        run.ask_to_stop()
    run.wait_for_end()
    return run


def mistake(make_run: MakeRun) -> ClusterRun:
    return _smoke_script(make_run("mistake"), "--set", "m6.training.totl_steps=4")


def smoke_script(make_run: MakeRun) -> ClusterRun:
    return _smoke_script(make_run("smoke_script"))


def _smoke_script(run: ClusterRun, *arguments: str) -> ClusterRun:
    """``sbatch scripts/slurm/smoke.sbatch`` as it is; the options make its configuration tiny."""
    own = json.loads(run.config.read_text(encoding="utf-8"))["m6"]
    small = {"training.total_steps": 4, "pseudo_to_real.switch_step": 2}
    settings = {**{f"model.{key}": value for key, value in own["model"].items()}, **small}
    settings |= {"schedule.warmup_steps": 1, "evaluation.num_rows": 2, "moe.num_experts": 4}
    settings |= {f"data.{key}": own["data"][key] for key in ("path", "tokenizer", "sequence_length", "num_workers")}
    options = [word for key, value in settings.items() for word in ("--set", f"m6.{key}={json.dumps(value)}")]
    script = ROOT / "scripts" / "slurm" / "smoke.sbatch"
    environment = f"RUN_DIR={run.root},M6_ROOT={ROOT},M6_CLUSTER_ENV={run.folder / 'cluster.env'}"
    where = [f"--chdir={ROOT}", f"--output={run.root}.log", f"--export=ALL,{environment}"]
    run.job = run.cluster.run("sbatch", "--parsable", *where, str(script), *options, *arguments).strip()
    run.wait_for_end()
    return run


def tutorial(make_run: MakeRun) -> tuple[ClusterRun, int]:
    """The tutorial's commands as they stand on the page, with a tiny configuration under the names that it uses.

    The run stands still while it is looked at, since the tiny one would be over before.
    """
    run = make_run("tour_slurm", train_batch_size=16)
    jobs = run.folder / "configs" / "jobs"
    jobs.mkdir(parents=True)
    (jobs.parent / "m6_smoke.json").write_text(run.config.read_text(encoding="utf-8"), encoding="utf-8")
    description, submission, status, stop, resumption = blocks("docs/tutorials/slurm.md")
    job = {**json.loads(description.text), "memory_gb_per_node": 1, "shared_folders": [str(run.folder)]}
    (jobs / "cpu_2x1.json").write_text(json.dumps(job), encoding="utf-8")
    run.job = execute(submission, run.folder).split()[-1]
    with run.held():
        assert f"of {STEPS}" in execute(status, run.folder)
        execute(stop, run.folder)
    run.wait_for_end()
    stopped_at = run.newest_checkpoint()
    run.job = execute(resumption, run.folder).split()[-1]
    run.wait_for_end()
    return run, stopped_at


def cancelled(make_run: MakeRun) -> ClusterRun:
    run = make_run("cancelled")
    run.submit()
    with run.held():
        run.cluster.run("scancel", run.job)
        run.wait_for_end()
    run.wait_for_no_ranks()
    return run


def rank_crash(make_run: MakeRun) -> tuple[ClusterRun, int]:
    run = make_run("rank_crash")
    run.submit()
    run.wait_for_step(MIDDLE)
    run.kill(1)
    run.wait_for_attempt(2)
    checkpoint = run.checkpoints()[-1]
    run.wait_for_end()
    return run, checkpoint


def crash_loop(make_run: MakeRun) -> ClusterRun:
    run = make_run("crash_loop")
    run.submit()
    for attempt in (1, 2):
        run.wait_for_attempt(attempt)
        run.kill(1)
        run.wait_for_no_ranks()
    run.wait_for_end()
    return run


def hang(make_run: MakeRun) -> tuple[ClusterRun, int]:
    run = make_run("hang", "STEP_TIMEOUT_S=60 EVIDENCE_S=8")
    run.submit()
    run.wait_for_step(MIDDLE)
    process = run.kill(1, signal.SIGSTOP)
    # To tell its stacks the rank is made to go on; the run would soon be over.
    said = run.attempts()[0] / "rank_00001.log"
    run.wait_until(lambda: "most recent call first" in said.read_text(encoding="utf-8"), "the stacks of rank 1")
    run.hold_until_attempt(process, 2)
    checkpoint = run.checkpoints()[-1]
    run.wait_for_end()
    return run, checkpoint


def not_finite(make_run: MakeRun) -> ClusterRun:
    run = make_run("not_finite", optimizer__params__lr=1e18)
    run.submit()
    run.wait_for_end()
    return run


def lost_node(make_run: MakeRun) -> tuple[ClusterRun, str, int]:
    run = make_run("lost_node")
    run.submit(partition="fragile")
    run.wait_for_ranks()
    lost = run.cluster.run("scontrol", "show", "hostnames", run.cluster.job_fields(run.job)["NodeList"]).split()[-1]
    run.wait_for_step(MIDDLE)
    run.cluster.lose_node(lost)
    run.wait_for_no_ranks()
    checkpoint = run.checkpoints()[-1]
    run.wait_for_file("DONE")
    return run, lost, checkpoint


def sick_node(make_run: MakeRun) -> tuple[ClusterRun, str, str]:
    """Whichever node writes its name first stays sick."""
    hook = (
        "(set -C; echo $SLURMD_NODENAME >$RUN_DIR/slurm/sick) 2>/dev/null; "
        "[[ $(<$RUN_DIR/slurm/sick) != $SLURMD_NODENAME ]] || { echo smells of smoke; false; }"
    )
    run = make_run("sick_node", f"export PREFLIGHT_HOOK='{hook}'")
    run.submit()
    run.wait_for_end()
    successor = run.log().split(" goes on without ")[0].rsplit("job ", 1)[1]
    run.wait_for_end(successor)
    return run, (run.root / "slurm" / "sick").read_text().strip(), successor


def all_nodes_sick(make_run: MakeRun) -> ClusterRun:
    return _refused(make_run("all_nodes_sick", "export PREFLIGHT_HOOK='echo too strict; false'"))


def no_room(make_run: MakeRun) -> ClusterRun:
    return _refused(make_run("no_room", "MIN_DISK_GB=1000000000"))


def silent_node(make_run: MakeRun) -> ClusterRun:
    """Both nodes hang in preflight."""
    return _refused(make_run("silent_node", "export PREFLIGHT_HOOK='sleep 600' PREFLIGHT_TIMEOUT_S=5"))


def _refused(run: ClusterRun) -> ClusterRun:
    run.submit()
    run.wait_for_end()
    return run


def corrupt_checkpoint(make_run: MakeRun) -> dict:
    run = make_run("corrupt_checkpoint")
    run.submit()
    run.wait_for_step(12)
    granted = 0
    while not granted:  # a step at which the run saves anyway says nothing
        (run.root / "SAVE").touch()
        run.wait_until(lambda: not (run.root / "SAVE").exists(), "SAVE to be granted")
        granted = next((step for step in run.checkpoints() if step % INTERVAL), 0)
    run.wait_for_step(MIDDLE)
    (run.root / "STOP").touch()
    state = run.wait_for_end()
    found = {
        "run": run,
        "granted": granted,
        "state_after_stop": state,
        "restarts": run.cluster.job_fields(run.job)["Restarts"],
        "checkpoints": run.checkpoints(),
    }
    shard = sorted((run.root / "checkpoints").glob(f"step_{run.checkpoints()[-1]:08d}/rank_00001_*.safetensors"))[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (run.root / "STOP").unlink()
    run.submit()
    run.wait_for_end()
    return found


def full_disk(make_run: MakeRun) -> tuple[ClusterRun, str]:
    """A limit on the size of a file stands for the disk: a write beyond it fails in the same place."""
    run = make_run("full_disk", "[[ -e $RUN_DIR/slurm/emptied ]] || ulimit -f 100")
    run.submit()
    run.wait_for_end()
    reason = (run.root / "FATAL").read_text()
    (run.root / "FATAL").unlink()
    (run.root / "slurm" / "emptied").touch()
    run.submit()
    run.wait_for_end()
    return run, reason


def chain(make_run: MakeRun) -> tuple[ClusterRun, list[str]]:
    return _stop_the_first(make_run("chain"), chain=3)


def array(make_run: MakeRun) -> tuple[ClusterRun, list[str]]:
    return _stop_the_first(make_run("array"), array=3)


def _stop_the_first(run: ClusterRun, **how: int) -> tuple[ClusterRun, list[str]]:
    jobs = run.submit(**how)
    if "array" in how:
        jobs = [f"{run.job}_{task}" for task in range(1, how["array"] + 1)]
    with run.held():
        run.ask_to_stop(jobs[0])
        run.wait_for_stop()
    for job in jobs:
        run.wait_for_end(job)
    return run, jobs


def other_number_of_nodes(make_run: MakeRun) -> tuple[ClusterRun, int]:
    run = make_run("other_number_of_nodes", m6__training__ep_size=2)
    run.submit(nodes=4)
    run.wait_for_step(MIDDLE)
    (run.root / "STOP").touch()
    run.wait_for_end()
    step = run.step()
    (run.root / "STOP").unlink()
    run.submit(nodes=2)
    run.wait_for_end()
    return run, step


def _long(make_run: MakeRun, name: str) -> ClusterRun:
    changes = {"m6__training__total_steps": kills.steps_for(KILLS), "m6__checkpoint__interval_steps": kills.INTERVAL}
    return make_run(name, **changes)


def long_left_alone(make_run: MakeRun) -> ClusterRun:
    run = _long(make_run, "long_left_alone")
    run.submit()
    run.wait_for_end()
    return run


def random_kills(make_run: MakeRun) -> tuple[ClusterRun, list[kills.Kill]]:
    run = _long(make_run, "random_kills")
    run.submit()
    return run, kills.kill_at_random(run, KILLS, seed=0)
