"""The memory of ``m6 serve`` under requests that are mixed, large, damaged, slow and cut off.

    python scripts/benchmarks/service_memory.py RUN [--requests 10000] [--clients 64]

RUN is the folder of a run. The page gives the largest memory of the process over the one before the first request, and
the answers by kind of request.
"""

from __future__ import annotations

import argparse
import io
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import psutil
from PIL import Image
from record import Recorder

DEADLINE_S = 5


def png(side: int, mode: str = "RGB", height: int | None = None) -> bytes:
    """A picture of one colour: a small file however large it is when decoded."""
    buffer = io.BytesIO()
    Image.new(mode, (side, height or side)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def noise(side: int) -> bytes:
    """A picture that no compression makes smaller."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def kinds(host: str, port: int) -> dict[str, tuple[float, Callable[[httpx.Client], str]]]:
    """The kinds of requests by name: how many of 1,000 requests, and what sends one and returns its outcome."""

    def posts(path: str, content: bytes, kind: str = "image/png") -> Callable[[httpx.Client], str]:
        def send(client: httpx.Client) -> str:
            return str(client.post(path, content=content, headers={"content-type": kind}).status_code)

        return send

    def leaves(client: httpx.Client) -> str:
        with socket.create_connection((host, port)) as connection:
            connection.sendall(
                b"POST /caption HTTP/1.1\r\nhost: m6\r\ncontent-length: 16000000\r\n\r\n" + b"x" * 200_000
            )
        return "left"

    def waits(client: httpx.Client) -> str:
        """Sends most of a large body and keeps the connection until the server gives it up."""
        with socket.create_connection((host, port), timeout=60) as connection:
            connection.sendall(b"POST /caption HTTP/1.1\r\nhost: m6\r\ncontent-length: 16000000\r\n\r\n")
            try:
                connection.sendall(b"x" * 15_000_000)
                return connection.recv(4096).split(b" ")[1].decode()
            except (OSError, IndexError):
                return "closed"

    boundary = b"--m6\r\ncontent-disposition: form-data; name=p; filename=p.png\r\n\r\n"
    return {
        "small picture": (600, posts("/caption?max_new_tokens=2", png(48))),
        "photograph of 12 megapixels": (40, posts("/caption?max_new_tokens=2", png(4000, height=3000))),
        "picture of 49 megapixels": (40, posts("/caption?max_new_tokens=2", png(7000, "RGBA"))),
        "picture of 14 MB": (30, posts("/caption?max_new_tokens=2", noise(2160))),
        "picture of 1 x 1,000,000": (20, posts("/caption", png(1, height=1_000_000))),
        "no picture": (60, posts("/caption", b"hello")),
        "body that is too large": (30, posts("/caption", bytes(17 << 20))),
        "form": (
            60,
            posts(
                "/caption?max_new_tokens=2", boundary + png(48) + b"\r\n--m6--\r\n", "multipart/form-data; boundary=m6"
            ),
        ),
        "health": (60, lambda client: str(client.get("/health").status_code)),
        "long text": (30, posts("/generate", b'{"text": "' + b"a" * 60_000 + b'"}', "application/json")),
        "client that leaves": (20, leaves),
        "client that waits": (10, waits),
    }


def main() -> None:
    """Runs the requests and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    recorder = Recorder("service_memory", "The memory of the service under 10,000 mixed requests")
    command = [sys.executable, "-m", "m6", "serve", "--checkpoint", str(arguments.run), "--port", "0"]
    command += ["--deadline", str(DEADLINE_S), "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://([\d.]+):(\d+)", process.stdout.readline())
            assert match is not None, "the service did not start"
            memory, answers, seconds = put_under_load(process.pid, match[1], int(match[2]), arguments)
        finally:
            process.terminate()
    rows = [
        [name, *(str(counts.total()), ", ".join(f"{k}: {n}" for k, n in sorted(counts.items())))]
        for name, counts in answers.items()
    ]
    idle, highest, last = memory
    notes = (
        f"{arguments.requests:,} requests of {arguments.clients} clients in {seconds:.0f} seconds. Resident memory: "
        f"{idle} MiB before the first request, {highest} MiB at most, {last} MiB at the end: {highest - idle} MiB "
        "above the idle service."
    )
    numbers = {"answers": answers, "seconds": seconds, "idle_mib": idle, "highest_mib": highest, "last_mib": last}
    recorder.write(["request", "number", "answers"], rows, notes, numbers)


def put_under_load(
    pid: int, host: str, port: int, arguments: argparse.Namespace
) -> tuple[tuple[int, int, int], dict[str, Counter[str]], float]:
    """Sends the requests; returns (idle, highest, last) resident MiB, the answers by kind, and the seconds."""
    service = psutil.Process(pid)
    chosen = kinds(host, port)
    with httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
        assert chosen["small picture"][1](client) == "200"  # the first batch loads what every batch needs
    idle = highest = service.memory_info().rss >> 20
    shares = np.array([share for share, _ in chosen.values()])
    order = np.random.default_rng(0).choice(len(chosen), arguments.requests, p=shares / shares.sum()).tolist()
    names, senders = list(chosen), [send for _, send in chosen.values()]
    answers = {name: Counter[str]() for name in names}
    lock = threading.Lock()

    def work() -> None:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client:
            while True:
                with lock:
                    if not order:
                        return
                    kind = order.pop()
                try:
                    answer = senders[kind](client)
                except httpx.HTTPError as error:
                    answer = type(error).__name__
                with lock:
                    answers[names[kind]][answer] += 1

    begin = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(arguments.clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        highest = max(highest, service.memory_info().rss >> 20)
        time.sleep(0.05)
    return (idle, highest, service.memory_info().rss >> 20), answers, time.monotonic() - begin


if __name__ == "__main__":
    main()
