"""Requests that would keep memory, threads or connections: each meets its limit on a real server."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from m6.serving import app as app_module
from m6.serving import server
from tests.fixtures.services import serve

PICTURE = b"a picture"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server whose pictures are what the client sends."""
    monkeypatch.setattr(app_module, "open_picture", lambda kind, body, size: app_module.uploaded_file(kind, body))
    with serve() as where:
        yield where


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=30)


def post(length: int, kind: str = "image/png", path: str = "/caption") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: m6\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()


def read_all(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    received = b""
    while part := client.recv(65536):
        received += part
    return received


def read_answer(client: socket.socket) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    with client.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        length = 0
        while (line := stream.readline().lower()) not in (b"\r\n", b""):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, json.loads(stream.read(length))


def works(address: tuple[str, int]) -> bool:
    with connect(address) as client:
        client.sendall(post(len(PICTURE)) + PICTURE)
        return read_answer(client) == (200, {"text": PICTURE.decode()})


def test_headers_that_never_end(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 1.0)
    with connect(address) as silent, connect(address) as slow:
        slow.sendall(b"POST /caption HTTP/1.1\r\nhost: m6\r\n")
        assert read_all(silent) == read_all(slow) == b""
    monkeypatch.setattr(server, "HEADER_SECONDS", 10.0)
    assert works(address)


def test_a_further_request_of_a_connection_has_its_time_too(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 1.0)
    with connect(address) as client:
        for _ in range(2):
            client.sendall(post(len(PICTURE)) + PICTURE)
            assert read_answer(client)[0] == 200
        client.sendall(b"POST")
        assert read_all(client) == b""


def test_a_body_that_goes_on_after_the_answer(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    """The next byte ends the time that uvicorn gives an idle connection."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 1.0)
    with connect(address) as client:
        client.sendall(post(10, path="/caption?unknown=1"))
        assert read_answer(client)[0] == 422
        client.sendall(b"x")
        assert read_all(client) == b""
    assert works(address)


def test_a_request_that_runs_longer_than_its_headers_may_take(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "HEADER_SECONDS", 1.0)
    with connect(address) as client:
        client.sendall(post(len(PICTURE)))
        time.sleep(1.5)
        client.sendall(PICTURE)
        assert read_answer(client)[0] == 200


def test_more_connections_than_allowed(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with connect(address) as first, connect(address) as second:
        for client in (first, second):  # answered, so both are known to the server
            client.sendall(post(len(PICTURE)) + PICTURE)
            assert read_answer(client)[0] == 200
        with connect(address) as third:
            assert read_answer(third) == (503, {"detail": "too many connections"})
            assert read_all(third) == b""
        first.sendall(post(len(PICTURE)) + PICTURE)
        assert read_answer(first)[0] == 200


def test_a_body_that_never_ends(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.2)
    with connect(address) as client:
        client.sendall(post(100) + b"x" * 50)
        answer = read_all(client)  # the connection is closed, too
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"not complete after 0.2 seconds" in answer
    assert works(address)


def test_the_deadline_covers_the_body(address: tuple[str, int]):
    with connect(address) as client:
        client.sendall(post(100, path="/caption?deadline_s=0.2") + b"x" * 50)
        assert read_all(client).startswith(b"HTTP/1.1 504 ")


def test_the_deadline_covers_decoding(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    decoded: list[bytes] = []

    def decode(kind: str, body: bytes, size: int) -> bytes:
        decoded.append(body)
        gate.wait(30)
        return body

    monkeypatch.setattr(app_module, "open_picture", decode)
    clients = [connect(address) for _ in range(app_module.NUM_THREADS + 2)]
    for client in clients:
        client.sendall(post(len(PICTURE), path="/caption?deadline_s=3") + PICTURE)
    assert [read_answer(client)[0] for client in clients] == [504] * len(clients)
    gate.set()
    monkeypatch.undo()
    monkeypatch.setattr(app_module, "open_picture", lambda kind, body, size: body)
    assert works(address)
    assert len(decoded) == app_module.NUM_THREADS  # those that still waited for a thread are not decoded for nobody
    for client in clients:
        client.close()


@pytest.mark.parametrize("header", [post(1001), post(0).replace(b"content-length: 0", b"transfer-encoding: chunked")])
def test_a_body_that_is_too_large(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, header: bytes):
    monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 1024)
    with connect(address) as client:
        client.sendall(header.replace(b"1001", b"1025") + (b"401\r\n" if b"chunked" in header else b"") + b"x" * 1025)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"larger than 1 KiB" in answer


def test_bodies_share_a_memory(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "MAX_HELD_BYTES", 1000)
    with connect(address) as unfinished:
        unfinished.sendall(post(901) + b"x" * 900)
        status = 0
        for _ in range(1000):  # until the server has read the unfinished body
            with connect(address) as client:
                client.sendall(post(200) + b"x" * 200)
                status, answer = read_answer(client)
            if status == 429:
                break
        assert (status, answer) == (429, {"detail": "the bodies of other requests leave no memory for this one"})
        unfinished.sendall(b"x")
        assert read_answer(unfinished)[0] == 200
    with connect(address) as client:  # what was held is given back
        client.sendall(post(1000) + b"x" * 1000)
        assert read_answer(client)[0] == 200


def form(*parts: bytes) -> bytes:
    return b"".join(b"--m6\r\n" + part + b"\r\n" for part in parts) + b"--m6--\r\n"


FILE = b'content-disposition: form-data; name="picture"; filename="p.png"\r\n\r\n' + PICTURE
FIELD = b'content-disposition: form-data; name="note"\r\n\r\nhello'


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (form(FILE), "multipart/form-data; boundary=m6", 200),
        (form(FILE), 'Multipart/Form-Data; boundary="m6"', 200),
        (form(FIELD, FILE), "multipart/form-data; boundary=m6", 'has the field "note", expected the picture alone'),
        (form(FILE, FILE), "multipart/form-data; boundary=m6", "has 2 files"),
        (form(FILE), "multipart/form-data", "cannot be read"),
        (form(FILE)[:60], "multipart/form-data; boundary=m6", "has 0 files"),
        (form(FILE), "multipart/form-data; boundary=other", "cannot be read"),
        (form(b"\x00"), "multipart/form-data; boundary=m6", "cannot be read"),
    ],
)
def test_a_form_uploads_one_file(address: tuple[str, int], body: bytes, kind: str, expected: Any):
    with connect(address) as client:
        client.sendall(post(len(body), kind) + body)
        status, answer = read_answer(client)
    if expected == 200:
        assert (status, answer) == (200, {"text": PICTURE.decode()})
    else:
        assert status == 422
        assert expected in answer["detail"]


def test_a_client_that_leaves(address: tuple[str, int], caplog: pytest.LogCaptureFixture):
    client = connect(address)
    client.sendall(post(100) + b"x" * 50)
    client.close()
    assert works(address)
    assert "Traceback" not in caplog.text
    assert "Exception" not in caplog.text
