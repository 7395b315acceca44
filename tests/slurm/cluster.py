"""A private Slurm cluster of virtual nodes on this machine: one controller, one slurmd per node, no systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
FRAGILE_NODES = ("f1", "f2", "f3")  # for a test that loses one, while jobs of others run
ALL_NODES = NODES + FRAGILE_NODES
_SBIN = ("/usr/sbin", "/usr/bin", "/sbin")
_MUNGE_KEY = Path("/etc/munge/munge.key")
_LONGEST_WAIT_S = 1500  # a machine that does other work too may take long
# What srun gives to every process of a step.
_RANK, _NODE = "SLURM_PROCID", "SLURMD_NODENAME"


def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root: the daemons of Slurm and munge are started as their own users"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if _find(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    return ""


def wait_until(condition: Callable[[], object], what: str, interval_s: float = 0.05) -> None:
    """Returns once ``condition()`` is true, which is asked every ``interval_s`` seconds.

    Raises:
        TimeoutError: it never became true; ``what`` says what was waited for.
    """
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_LONGEST_WAIT_S} s for {what}")
        time.sleep(interval_s)


def send(process: int, number: signal.Signals) -> None:
    """Sends a signal to a process, if there still is one; 0 is none."""
    if process:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


class LocalCluster:
    """Four nodes of a partition that takes what a test wants; everything it writes lies in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started_munge = False
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [
            name for name in self.environment if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"
        ]:
            del self.environment[name]

    def start(self) -> None:
        self._started_munge = _start_munge()
        for name in ("state", "log", *(f"spool_{node}" for node in ALL_NODES)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(self._configuration(), encoding="utf-8")
        self.run("slurmctld", "-c", "-f", str(self.folder / "slurm.conf"))
        for node in ALL_NODES:
            self.start_node(node)
        wait_until(self._is_ready, "idle nodes", interval_s=0.5)

    def _is_ready(self) -> bool:
        with contextlib.suppress(RuntimeError):  # the controller does not answer yet
            return self.idle_nodes() == set(ALL_NODES)
        return False

    def start_node(self, node: str) -> None:
        self.run("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def stop(self) -> None:
        if self.jobs():
            self.run("scancel", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
        for name in (*ALL_NODES, "slurmctld"):
            send(self._pid(name), signal.SIGTERM)
        for process in self._processes():
            send(process, signal.SIGKILL)
        if self._started_munge:
            subprocess.run(["munged", "--stop"], env=_with_sbin(), capture_output=True, timeout=60)

    def lose_node(self, node: str) -> None:
        """What a power cut does: the node's daemon, its step daemons and every process of theirs are gone."""
        send(self._pid(node), signal.SIGKILL)
        for process in self._processes():
            command, environment = _read(process, "cmdline"), _read(process, "environ")
            daemon = "slurmstepd" in command and f"/log/{node}.log" in _open_files(process)
            if daemon or f"{_NODE}={node}\0" in environment:
                send(process, signal.SIGKILL)

    def run(self, *command: str) -> str:
        """Runs a command of Slurm's; its standard output."""
        program = _find(command[0]) or command[0]
        result = subprocess.run(
            [program, *command[1:]], env=self.environment, capture_output=True, text=True, timeout=300
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}: {result.stdout}{result.stderr}")
        return result.stdout

    def idle_nodes(self) -> set[str]:
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return {name for name, state in map(str.split, lines) if state == "idle"}

    def jobs(self) -> list[str]:
        """The ids of the jobs that are not yet over."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED ...; empty for a job that Slurm no longer knows."""
        return self.job_fields(job).get("JobState", "")

    def job_fields(self, job: str) -> dict[str, str]:
        try:
            text = self.run("scontrol", "show", "job", "--oneliner", job)
        except RuntimeError as error:
            if "Invalid job id" not in str(error):
                raise
            return {}
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def ranks(self, run: Path) -> dict[int, int]:
        """The trainer's running processes in a run's folder: rank to process id."""
        found = {}
        for process in _all_processes():
            if f"--run-dir\0{run}\0" in _read(process, "cmdline"):
                environment = _read(process, "environ")
                if f"{_RANK}=" in environment and _read(process, "comm").startswith("python"):
                    found[int(environment.split(f"\0{_RANK}=")[1].split("\0")[0])] = process
        return found

    def _processes(self) -> list[int]:
        """Everything that the cluster started: each process was told where its configuration lies."""
        mark = f"SLURM_CONF={self.folder / 'slurm.conf'}\0"
        own = os.getpid()
        return [process for process in _all_processes() if process != own and mark in _read(process, "environ")]

    def _pid(self, name: str) -> int:
        try:
            return int((self.folder / f"{name}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _configuration(self) -> str:
        host, folder = socket.gethostname().split(".")[0], self.folder
        ports = _free_ports(len(ALL_NODES) + 1)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000 "
            f"Feature={'virtual,fast' if node in ('n1', 'n2') else 'virtual'}"
            for node, port in zip(ALL_NODES, ports, strict=False)
        )
        return f"""
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[-1]}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits for as long as a credential lives: 120 s by default.
AuthInfo=cred_expire=15
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SlurmdTimeout=40
MessageTimeout=60
BatchStartTimeout=120
InactiveLimit=0
MinJobAge=86400
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
{nodes}
PartitionName=smoke Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE
PartitionName=fragile Nodes={",".join(FRAGILE_NODES)} MaxTime=INFINITE
"""


def _start_munge() -> bool:
    """Starts munge unless it runs; whether it did."""
    if _munge_works():
        return False
    if not _MUNGE_KEY.exists():
        _MUNGE_KEY.write_bytes(os.urandom(1024))
        _MUNGE_KEY.chmod(0o400)
        shutil.chown(_MUNGE_KEY, "munge", "munge")
    for folder, mode in (("/run/munge", 0o755), ("/var/lib/munge", 0o711), ("/var/log/munge", 0o700)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder).chmod(mode)
        shutil.chown(folder, "munge", "munge")
    subprocess.run(["runuser", "-u", "munge", "--", str(_find("munged"))], check=True, timeout=30)
    wait_until(_munge_works, "munge")
    return True


def _munge_works() -> bool:
    encoded = subprocess.run(["munge", "-n"], capture_output=True, timeout=30)
    return (
        encoded.returncode == 0
        and subprocess.run(["unmunge"], input=encoded.stdout, capture_output=True).returncode == 0
    )


def _with_sbin() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join((os.environ.get("PATH", ""), *_SBIN))}


def _find(name: str) -> str | None:
    return shutil.which(name, path=_with_sbin()["PATH"])


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel hands out, so that nobody takes them before the daemons do."""
    found: list[int] = []
    for port in range(20_000, 32_000):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} ports are free")


def _all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _open_files(process: int) -> str:
    try:
        return "\n".join(os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return ""
