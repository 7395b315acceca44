"""Requests of any kind: an answer that the interface documents, and a service that goes on."""

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.services import serve
from tests.fuzz.examples import long_and_short, search
from tests.fuzz.test_rows import PICTURE, cells, names

DOCUMENTED = {200, 400, 404, 405, 408, 413, 422, 429, 501, 503, 504}

paths = st.sampled_from(["/caption", "/generate", "/health", "/ready", "/", "/docs", "/nowhere"])
kinds = st.sampled_from(
    [
        "image/png",
        "application/json",
        "multipart/form-data; boundary=m6",
        "multipart/form-data",
        "",
        "text/plain; charset=\x7f",
    ]
)
headers = st.sampled_from(
    [
        b"content-disposition: form-data; name=p; filename=p.png",
        b"content-disposition: form-data; name=p",
        b"content-transfer-encoding: base64",
        b"x:",
        b"",
    ]
)
parts = st.tuples(st.lists(headers, max_size=3), st.binary(max_size=30) | st.just(PICTURE))
forms = st.lists(parts, max_size=3).map(
    lambda chosen: (
        b"".join(b"--m6\r\n" + b"\r\n".join(heads) + b"\r\n\r\n" + data + b"\r\n" for heads, data in chosen)
        + b"--m6--\r\n"
    )
)
damaged_pictures = st.tuples(st.integers(0, len(PICTURE)), st.binary(max_size=4)).map(
    lambda change: PICTURE[: change[0]] + change[1] + PICTURE[change[0] + len(change[1]) :]
)
drawings = st.fixed_dictionaries({}, optional={"text": cells, "seed": cells, "index": cells, "other": cells})
bodies = st.one_of(
    st.binary(max_size=60),
    st.just(PICTURE),
    damaged_pictures,
    forms,
    drawings.map(json.dumps).map(str.encode),
    cells.map(json.dumps).map(str.encode),
)
queries = st.dictionaries(
    st.sampled_from(["max_new_tokens", "deadline_s", "x"]),
    names | st.integers().map(str) | st.floats().map(str),
    max_size=2,
)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serve() as where:
        yield where


@long_and_short(100, 400)
def test_requests(number: int, address: tuple[str, int]):
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=60) as client:

        @given(st.sampled_from(["POST", "POST", "POST", "GET", "PUT"]), paths, kinds, queries, bodies)
        def check(method: str, path: str, kind: str, query: dict[str, str], body: bytes) -> None:
            query = {name: value.encode("utf-8", "replace").decode() for name, value in query.items()}
            answer = client.request(
                method, path, params=query, content=body, headers={"content-type": kind.encode("latin-1")}
            )
            assert answer.status_code in DOCUMENTED, answer.text
            if answer.status_code == 422:
                assert isinstance(answer.json()["detail"], str)

        search(number, check)
        assert client.post("/caption", content=PICTURE, timeout=60).json() == {"text": "(8, 8)"}


@long_and_short(60, 250)
def test_bytes_that_are_no_request(number: int, address: tuple[str, int]):
    lines = st.sampled_from(
        [
            b"POST /caption HTTP/1.1\r\n",
            b"GET / HTTP/1.1\r\n",
            b"host: m6\r\n",
            b"content-length: 5\r\n",
            b"content-length: -1\r\n",
            b"transfer-encoding: chunked\r\n",
            b"expect: 100-continue\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\n",
            b"\r\n",
            b"FFFFFFFFFFFFFFFF\r\n",
            b"hello",
        ]
    )

    @given(st.lists(lines | st.binary(max_size=20), max_size=8))
    def check(sent: list[bytes]) -> None:
        with socket.create_connection(address, timeout=30) as client:
            client.sendall(b"".join(sent))
            client.shutdown(socket.SHUT_WR)

    search(number, check)
    answer = httpx.post(f"http://{address[0]}:{address[1]}/caption", content=PICTURE)
    assert answer.json() == {"text": "(8, 8)"}
