"""How a process joins its group; memory that it keeps on a CPU for its next step, and gives back."""

import itertools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from m6.errors import RetryableError, UserError
from m6.runs.environment import is_main_of_environment, rank_variables, ranks_per_node, world_size_of_environment
from m6.runs.processes import _claim, meet, own_device
from tests.distributed.spawn import free_port

CODE = """
import torch
from m6.runs.processes import keep_freed_memory, return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

keep_freed_memory(torch.device("cpu"))
before = resident()
pieces = [torch.ones(1 << 20) for _ in range(100)]  # 4 MiB each
pinned = torch.ones(1 << 10)  # lies behind them, so that the end of the heap cannot be cut off
del pieces
kept = resident() - before
return_freed_memory(torch.device("cpu"))
print(round(kept), round(resident() - before))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory in this way")
def test_freed_memory_is_kept_until_it_is_returned():
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    kept, left = map(int, ended.stdout.split()[-2:])
    assert kept >= 390, "400 MiB wait for the next step"
    assert left <= 40, "and go back to the kernel"


ALONE = """
import atexit
import torch.distributed

# What is registered first is called last.
atexit.register(lambda: print("initialized", torch.distributed.is_initialized()))
from m6.runs.processes import start

assert start().world_size == 1
print("initialized", torch.distributed.is_initialized())
"""


def test_a_process_alone_needs_no_address_and_destroys_its_group():
    """A port that was free when it was looked for may not be any more when it is opened; gloo's threads can abort a
    process that exits while they run."""
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    ended = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["initialized True", "initialized False"]


TIMEOUTS = """
from m6.runs.processes import start

start(timeout_s=1234)

import torch
from deepspeed.utils import groups
from torch.distributed import distributed_c10d, new_group

for group in (new_group([0]), groups._clone_world_group()):
    print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
print(distributed_c10d._get_default_timeout(distributed_c10d.Backend.NCCL).total_seconds())
"""


def test_groups_of_some_ranks_wait_as_long_as_the_group_of_all():
    """Also those of DeepSpeed 0.19.8, and with NCCL, for which torch 2.13 would wait 10 minutes."""
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    ended = subprocess.run([sys.executable, "-c", TIMEOUTS], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-3:] == ["1234.0"] * 3


def meet_in_threads(ranks: Iterable[int], world_size: int, timeout_s: float, **cards: list[bool]) -> list[Any]:
    """What each of these ranks gets: its store, or its error; ``cards`` are arguments by rank."""
    with (
        mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())),
        ThreadPoolExecutor(world_size) as threads,
    ):
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        own = ({name: values[rank] for name, values in cards.items()} for rank in ranks)
        met = [threads.submit(meet, rank, world_size, timeout_s, **each) for rank, each in zip(ranks, own, strict=True)]
        return [each.exception() or each.result() for each in met]


def test_ranks_meet():
    stores = meet_in_threads(range(3), 3, 60.0)
    stores[1].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 3


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([0], r"1 of 3 ranks came to 127\.0\.0\.1:\d+ within 1 s, but not rank 1, rank 2; their own logs say why"),
        ([0, 2], r"2 of 3 ranks came to 127\.0\.0\.1:\d+ within 1 s, but not rank 1; their own logs say why"),
        ([1, 2], r"nothing listened at MASTER_ADDR 127\.0\.0\.1, MASTER_PORT \d+ for 1 s \(Connection refused\)"),
    ],
)
def test_ranks_that_do_not_come_are_named_by_those_that_wait(ranks: list[int], said: str):
    """A rank may have refused its own configuration, and not every launcher ends the others then."""
    for error in meet_in_threads(ranks, 3, 1.0):
        assert isinstance(error, RetryableError)
        assert re.match(said, str(error)), error


@pytest.mark.parametrize("has_gpu", [[True, True, False], [False, True, True]])
def test_ranks_of_which_only_some_see_a_gpu(has_gpu: list[bool]):
    """As after a driver has failed on one node. No collective of NCCL and gloo would ever end."""
    errors = meet_in_threads(range(3), 3, 60.0, has_gpu=has_gpu)
    assert all(isinstance(error, RetryableError) for error in errors)
    [said] = {str(error) for error in errors}
    found = re.match(r"PyTorch sees (a|no) GPU on rank (\d) on .*, but (a|no) GPU on rank (\d) on .*; repair or", said)
    assert found is not None, said
    assert [has_gpu[int(found[number])] for number in (2, 4)] == [found[number] == "a" for number in (1, 3)]
    assert found[1] != found[3]
    assert len(meet_in_threads(range(2), 2, 60.0, has_gpu=[True, True])) == 2


def test_ranks_that_torchrun_starts_again_meet_in_the_same_store(monkeypatch: pytest.MonkeyPatch):
    """As other processes, after some that did not meet."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": server.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RetryableError, match=r"1 of 2 ranks came .*, but not rank 1"):
        meet(0, 2, 0.1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr("os.getpid", lambda: 1)
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda rank: meet(rank, 2, 60.0), range(2)))


def test_ranks_that_contradict_each_other():
    """Each by a thread of this process, which is known by its number."""
    with mock.patch("os.getpid", side_effect=itertools.count(1)):
        errors = meet_in_threads([0, 1, 1], 3, 60.0)
    assert {re.sub(r"\d+ on [^;\s]+", "N", str(error)) for error in errors} == {
        "RANK is 1 for process N and for process N; a launcher has to give each process a RANK of its own"
    }


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'; expected a number"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK is '-1'; expected a number"),
        ("RANK", "2", "RANK is 2 and WORLD_SIZE 2; expected a RANK from 0 to WORLD_SIZE - 1"),
        ("MASTER_PORT", "70000", "MASTER_PORT is '70000'; expected a port, 1 to 65535"),
    ],
)
def test_wrong_variables_of_a_launcher(name: str, value: str, said: str):
    environment = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with mock.patch.dict(os.environ, {**environment, name: value}), pytest.raises(UserError, match=re.escape(said)):
        meet(int(rank_variables()["RANK"]), 2)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_several_processes_need_an_address(name: str):
    environment = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    del environment[name]
    ended = subprocess.run(
        [sys.executable, "-c", "from m6.runs.processes import start; start()"],
        env={**{key: value for key, value in os.environ.items() if not key.startswith("MASTER_")}, **environment},
        capture_output=True,
        text=True,
    )
    assert f"UserError: {name} is not set, by which the 2 processes of WORLD_SIZE find each other" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 12),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "1"}, 4),  # torchrun, once on each node of a job
        ({"LOCAL_SIZE": "4"}, 4),  # deepspeed
        ({"SLURM_TASKS_PER_NODE": "6(x2)"}, 6),  # srun -n 12
        ({"SLURM_TASKS_PER_NODE": "5,4,3"}, 5),
        ({"SLURM_TASKS_PER_NODE": "1(x2),5(x2)"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "6(x2)", "SLURM_TASKS_PER_NODE": "8(x2)"}, 6),  # srun of fewer than sbatch
        ({"SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"SLURM_TASKS_PER_NODE": "40"}, 12),  # a shell of a job, which srun did not start
    ],
)
def test_ranks_that_share_a_node(variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch):
    """Each of them gets its share of the host's memory, whatever launcher started them."""
    for name in [name for name in os.environ if name.startswith(("LOCAL_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_per_node(12) == ranks


SRUN = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "MASTER_ADDR": "node"}
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "num_cards", "card"),
    [
        (SRUN, 8, 1),
        (SRUN, 1, 0),
        (TORCHRUN, 2, 1),
        (TORCHRUN, 1, None),  # the node may have lost the others
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "1"}, 1, 0),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "GPU-8a1f,"}, 1, 0),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1"}, 2, 1),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1"}, 1, None),
        (TORCHRUN | {"NVIDIA_VISIBLE_DEVICES": "5"}, 1, 0),  # a container for each rank
        (TORCHRUN | {"NVIDIA_VISIBLE_DEVICES": "all"}, 1, None),
    ],
)
def test_the_card_of_a_rank(
    variables: dict[str, str], num_cards: int, card: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Launchers that bind one card a rank show each its own card alone, whose number is 0 then."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_cards)
    with mock.patch.dict(os.environ, variables, clear=True):
        if card is None:
            with pytest.raises(
                UserError, match=r"LOCAL_RANK is 1, but this process sees 1 GPUs.*one rank for each GPU"
            ):
                own_device()
        else:
            assert own_device() == torch.device("cuda", card)
            assert os.environ["LOCAL_RANK"] == str(card), "which DeepSpeed reads"


def test_two_ranks_on_one_card_are_refused(monkeypatch: pytest.MonkeyPatch):
    store = torch.distributed.HashStore()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for rank, card in ((0, "a"), (1, "b"), (0, "a")):  # a process may start several times
        _claim(store, card, rank)
    with pytest.raises(UserError, match=r"rank 2 has the GPU b of rank 1 \(LOCAL_RANK 0, CUDA_VISIBLE_DEVICES 0\)"):
        _claim(store, "b", 2)


@pytest.mark.parametrize(
    ("variables", "rank", "world_size"),
    [
        ({}, 0, 1),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 3, 4),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "MASTER_ADDR": "node1"}, 3, 4),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, 0, 1),  # a shell that srun started
        # torchrun inside of a job
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
            | {"SLURM_LOCALID": "1", "MASTER_ADDR": "node1"},
            0,
            2,
        ),
    ],
)
def test_what_a_launcher_says_is_read_and_not_changed(
    variables: dict[str, str], rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
):
    """The device is chosen later by the same variables, so that the launcher has to be known then, too."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert (is_main_of_environment(), world_size_of_environment()) == (rank == 0, world_size)
    assert dict(os.environ) == before
