"""Inputs behind URLs: the same corpus as from a folder, nothing left behind, and clear messages."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar

import fsspec
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from m6.corpus import inputs
from m6.corpus.inputs import list_remote
from m6.corpus.launch import make_corpus
from m6.corpus.output import load_record
from m6.corpus.plan import make_plan
from m6.corpus.stages import run_task
from m6.corpus.work import prepare, work_folder
from m6.data.manifest import Manifest
from m6.errors import UserError
from tests.fixtures.corpus import built, own, recipe_of, text_of, write_lines


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """Tables in folders of a folder, and the folder "books" of text files beside it."""
    folder = tmp_path / "web"
    for number in range(3):
        write_lines(folder / f"part{number}" / "page.jsonl", [text_of((number, n), 120 + n) for n in range(8)])
    (tmp_path / "books" / "old").mkdir(parents=True)
    for number in range(5):
        (tmp_path / "books" / "old" / f"{number}.txt").write_text(text_of(("book", number), 300), encoding="utf-8")
    (folder / "notes.csv").write_text("not read", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _short_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_PAUSES_S", (0.0, 0.0))
        yield


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/", recursive=True)


def rows(folder: Path) -> list[dict[str, object]]:
    """All rows of a data folder with their splits."""
    manifest = Manifest.load(folder)
    return [
        row | {"split": split}
        for source in manifest.sources
        for split in ("train", "validation", "test")
        for file in manifest.files(source, split)
        for row in pq.read_table(file).to_pylist()
    ]


def everything(name: PurePosixPath) -> bool:
    return True


def recipe(out: Path, source: str, *texts: str):
    shares = {"validation_share": 0.2, "test_share": 0.2}
    return recipe_of(out, [*own("web", source), *(entry for path in texts for entry in own("books", path))], **shares)


def test_a_url_gives_the_corpus_of_its_folder(web: Path, tmp_path: Path, memory):
    expected = rows(built(recipe(tmp_path / "here", str(web), str(tmp_path / "books"))))
    assert len(expected) > 20
    for folder in ("web", "books"):
        memory.put(str(tmp_path / folder), f"/store/{folder}", recursive=True)
    assert rows(built(recipe(tmp_path / "there", "memory://store/web", "memory://store/books"))) == expected
    assert not list(work_folder(tmp_path / "there").rglob("page.jsonl"))


class Bucket(MemoryFileSystem):
    """Says of files what s3fs does: a listing has more keys than a look at one file, is kept, and answers for it."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("bucket://"))

    def ls(self, path: str, detail: bool = True, **named: object) -> list[dict[str, object]]:
        found = super().ls(path, detail=True)
        for info in found:
            if info["type"] == "file":
                info |= {"Key": info["name"], "Size": info["size"], "LastModified": 1.25, **self._tag(info["name"])}
                self.dircache[info["name"]] = info
        return found

    def info(self, path: str, **named: object) -> dict[str, object]:
        info = super().info(path)
        if info["type"] == "file":
            return self.dircache.get(info["name"], info | {"LastModified": 1, **self._tag(info["name"])})
        return info

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.pop(path, None)

    def _tag(self, path: str) -> dict[str, object]:
        return {"ETag": f'"{hashlib.sha256(self.cat_file(path)).hexdigest()}"'}


def test_a_bucket_is_read_by_tasks_that_did_not_list_it(web: Path, tmp_path: Path, memory, monkeypatch):
    monkeypatch.setattr(fsspec, "available_protocols", lambda: ["bucket"])
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    memory.put(str(web), "/store/web", recursive=True)
    settings = recipe(tmp_path / "there", "bucket://store/web")
    work = prepare(work_folder(settings.out), make_plan(settings))
    for task in range(2):
        Bucket.clear_instance_cache()  # as in a process of its own
        run_task(work.folder, "clean", task, 2)
    assert prepare(work.folder, make_plan(settings)).missing("clean", work.num_parts) == []
    lines = memory.cat_file("/store/web/part1/page.jsonl")
    memory.pipe("/store/web/part1/page.jsonl", lines[:-3] + b"x" + lines[-2:])
    with pytest.raises(UserError, match=r"other inputs: bucket:///store/web/part1/page\.jsonl has changed"):
        prepare(work.folder, make_plan(settings))


class Quiet(SimpleHTTPRequestHandler):
    """A web server without a log."""

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path, handler: type[SimpleHTTPRequestHandler] = Quiet) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("changed", ["size", "time"])
def test_a_file_of_a_web_server_that_changes(web: Path, tmp_path: Path, changed: str):
    file = web / "part1" / "page.jsonl"
    before = file.stat()
    with served(web) as url:
        settings = recipe(tmp_path / "there", url)
        work = prepare(work_folder(settings.out), make_plan(settings))
        if changed == "size":
            file.write_text('{"text": "another"}\n')
        os.utime(file, (before.st_atime, before.st_mtime + (5 if changed == "time" else 0)))
        with pytest.raises(UserError, match=r"unit \d: http://.*part1/page\.jsonl has changed since the corpus was"):
            run_task(work.folder, "clean", 0, 1)
        with pytest.raises(UserError, match=r"other inputs: http://.*part1/page\.jsonl has changed"):
            prepare(work.folder, make_plan(settings))


def test_a_copy_that_ends_early_is_not_read(web: Path, tmp_path: Path, memory, monkeypatch):
    memory.put(str(web), "/store/web", recursive=True)
    whole = (web / "part2" / "page.jsonl").stat().st_size

    def cut(self: object, path: str, target: str) -> None:
        Path(target).write_bytes(self.cat_file(path)[:100])

    monkeypatch.setattr(type(memory), "get_file", cut)
    settings = recipe(tmp_path / "there", "memory://store/web/part2/page.jsonl")
    with pytest.raises(UserError, match=f"cannot be copied: OSError: 100 of {whole} bytes arrived"):
        built(settings)


class Broken(Quiet):
    """A web server that ends the first answer to each request of a file early."""

    cut: ClassVar[set[str]] = set()

    def copyfile(self, source: IO[bytes], outputfile: IO[bytes]) -> None:
        is_first = not self.path.endswith("/") and self.path not in self.cut
        self.cut.add(self.path)
        outputfile.write(source.read(100) if is_first else source.read())


def test_what_a_web_server_fails_to_send_is_asked_for_again(web: Path, tmp_path: Path):
    expected = rows(built(recipe(tmp_path / "here", str(web))))
    with served(web, Broken) as url:
        assert rows(built(recipe(tmp_path / "there", url))) == expected
    assert "/part1/page.jsonl" in Broken.cut


def test_a_server_that_stays_away_is_named(web: Path, tmp_path: Path):
    with served(web) as url:
        settings = recipe(tmp_path / "there", url)
        work = prepare(work_folder(settings.out), make_plan(settings))
    with pytest.raises(UserError, match=r"part1/page\.jsonl cannot be copied: ClientConnectorError: Cannot connect"):
        run_task(work.folder, "clean", 1, 4)


def test_a_copy_from_a_web_server_may_take_long(monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": {"Authorization": "mine"}}})
    store, _ = inputs._open("http://127.0.0.1:9/web/")
    session = fsspec.asyn.sync(store.loop, store.set_session)
    assert (session.timeout.total, session.timeout.sock_connect, session.timeout.sock_read) == (None, 30, 60)
    assert session.headers["Authorization"] == "mine"


class Deadly(Quiet):
    """A web server that kills a process of the pool, once, when a certain file is asked for."""

    killed: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        if self.path.endswith("part1/page.jsonl") and not self.killed:
            self.killed.append(multiprocessing.active_children()[0].pid)
            os.kill(self.killed[0], signal.SIGKILL)
        super().do_GET()


@pytest.mark.slow
def test_a_web_server_and_a_process_that_is_killed(web: Path, tmp_path: Path):
    expected = rows(built(recipe(tmp_path / "here", str(web))))
    with served(web, Deadly) as url:
        settings = recipe(tmp_path / "there", url)
        with pytest.raises(
            UserError, match='a process of stage "clean" died, probably out of memory; the same command'
        ):
            make_corpus(settings, "local", 2)
        make_corpus(settings, "local", 2)
    assert Deadly.killed
    assert rows(settings.out) == expected


def test_one_file(web: Path, tmp_path: Path):
    found = rows(built(recipe(tmp_path / "there", f"file://{web}/part1/page.jsonl")))
    assert {row["id"].split(":")[0] for row in found} == {"web/page.jsonl"}
    [file] = list_remote(f"file://{web}/part1/page.jsonl", everything)
    assert (str(file.name), file.bytes) == ("page.jsonl", (web / "part1" / "page.jsonl").stat().st_size)


def test_only_the_part_that_is_read_lies_here(web: Path, tmp_path: Path, memory):
    memory.put(str(web), "/store/web", recursive=True)
    settings = recipe(tmp_path / "there", "memory://store/web")
    work = prepare(work_folder(settings.out), make_plan(settings))
    run_task(work.folder, "clean", 0, 2)
    assert not any((work.folder / "fetched").iterdir())


def test_a_file_that_changes_or_goes(web: Path, tmp_path: Path, memory):
    memory.put(str(web), "/store/web", recursive=True)
    settings = recipe(tmp_path / "there", "memory://store/web")
    work = prepare(work_folder(settings.out), make_plan(settings))
    memory.pipe("/store/web/part1/page.jsonl", b'{"text": "another"}\n')
    with pytest.raises(UserError, match=r"unit \d: memory:///store/web/part1/page.jsonl has changed since"):
        run_task(work.folder, "clean", 0, 1)
    with pytest.raises(UserError, match=r"other inputs: memory:///store/web/part1/page\.jsonl has changed"):
        prepare(work_folder(settings.out), make_plan(settings))
    memory.rm("/store/web/part2/page.jsonl")
    with pytest.raises(UserError, match=r"page\.jsonl cannot be copied: FileNotFoundError"):
        run_task(work.folder, "clean", 2, 3)
    assert not list(work.folder.rglob("*.tmp*"))


def test_a_key_that_climbs_out_of_its_folder_is_counted_and_not_copied(web: Path, tmp_path: Path, memory):
    memory.put(str(web), "/store/web", recursive=True)
    memory.store["/store/web/../../climbs.jsonl"] = memory.store["/store/web/part0/page.jsonl"]
    settings = recipe(tmp_path / "there", "memory://store/web")
    built(settings)
    removed = json.dumps(load_record(settings.out).model_dump(mode="json"))
    assert "file name climbs out of its folder" in removed
    assert not list(tmp_path.rglob("climbs.jsonl"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("memry://store/web", 'memry://store/web: unknown protocol; did you mean "memory"'),
        ("memory://store/none", "memory://store/none: no such file or folder, or it is empty"),
        ("http://127.0.0.1:9/web/", "http://127.0.0.1:9/web/ cannot be listed: "),
    ],
)
def test_urls_that_cannot_be_read(source: str, message: str, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        make_plan(recipe(tmp_path / "out", source))
    assert message in str(caught.value)


def test_a_folder_of_pictures_must_be_packed(tmp_path: Path, memory):
    memory.pipe({"/store/pictures/a.png": b"", "/store/pictures/metadata.jsonl": b"{}"})
    with pytest.raises(UserError, match=r"a folder of pictures must be on this machine, or be packed to \.tar"):
        make_plan(recipe(tmp_path / "out", "memory://store/pictures"))


def test_a_missing_plug_in_is_named(monkeypatch):
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match="s3://bucket/web: Install s3fs to access S3"):
        list_remote("s3://bucket/web", everything)


def test_a_connection_that_breaks_is_named_and_the_same_command_goes_on(web: Path, tmp_path: Path, memory, monkeypatch):
    memory.put(str(web), "/store/web", recursive=True)
    settings = recipe(tmp_path / "there", "memory://store/web")
    whole = type(memory).get_file

    def broken(self: object, path: str, target: str) -> None:
        if path.endswith("part2/page.jsonl"):
            Path(target).write_bytes(b'{"text": "ha')
            raise OSError("connection lost")
        whole(self, path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get_file", broken)
        with pytest.raises(UserError, match=r"part2/page\.jsonl cannot be copied: OSError: connection lost"):
            built(settings)
    assert not list((work_folder(settings.out) / "fetched").rglob("*.jsonl"))
    assert rows(built(settings)) == rows(built(recipe(tmp_path / "here", str(web))))


def test_a_folder_that_cannot_be_listed_is_not_left_out(web: Path, tmp_path: Path, memory, monkeypatch):
    memory.put(str(web), "/store/web", recursive=True)
    whole = type(memory).ls

    def broken(self: object, path: str, *rest: object, **named: object) -> object:
        if path.endswith("part1"):
            raise PermissionError("not yours")
        return whole(self, path, *rest, **named)

    monkeypatch.setattr(type(memory), "ls", broken)
    with pytest.raises(UserError, match="memory://store/web cannot be listed: PermissionError: not yours"):
        list_remote("memory://store/web", everything)
