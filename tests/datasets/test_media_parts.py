"""Media that cells name: their types, and what is read when a request is made."""

import io
import os
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from batchmill.datasets.conversion import Converted
from batchmill.datasets.formats import SourceFile
from batchmill.datasets.media import adding, files
from batchmill.datasets.media.adding import MediaAdder
from batchmill.datasets.media.files import read_file
from batchmill.datasets.media.loading import read_part
from batchmill.engines.media_copies import CopyReader
from batchmill.errors import InvalidRow
from batchmill.store.media_copies import path_of
from batchmill.types import DatasetSpec, MediaColumn, Row, RowError
from batchmill.wire.json_bytes import split_object
from batchmill.wire.media import type_of
from batchmill.wire.rows.forms import TableForm
from batchmill.wire.rows.rendered_rows import FAULT, MediaPart, fault_of, media_of, with_media

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"


def row_of(path, data: bytes) -> Row:
    part = MediaPart("image", "image/png", len(data), blake3(data).hexdigest(), path=str(path))
    form = TableForm("{q}", media=[MediaColumn("image", "img")])
    return Row(0, 0, with_media(b'{"q":"?","img":"a.png"}', [part]), form)


def test_a_request_has_what_was_sealed_or_is_none(tmp_path):
    """A file that has changed, in length or not, is gone, or is another kind of file now fails its row alone."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    row = row_of(path, PNG)
    (part,) = media_of(split_object(row.raw))
    row.media = (read_part(part, {}),)
    assert b"data:image/png;base64,iVBOR" in row.form.request(row).body
    for changed in (PNG[:-1], PNG + b"!", PNG[:-1] + b"?", b""):
        path.write_bytes(changed)
        with pytest.raises(InvalidRow, match="has changed") as refused:
            read_part(part, {})
        assert refused.value.code == "media_changed"
    path.unlink()
    with pytest.raises(InvalidRow, match="cannot be read"):
        read_part(part, {})
    os.mkfifo(path)
    with pytest.raises(InvalidRow, match="no regular file"):
        read_part(part, {})


def test_a_form_without_the_bytes_names_them_by_digest(tmp_path):
    """Sealing and estimates read no file again; requests fold by what the media are, not where they lie."""
    one, other = row_of(tmp_path / "1", PNG), row_of(tmp_path / "2", PNG)
    assert one.form.request(one).body == other.form.request(other).body
    assert blake3(PNG).hexdigest().encode() in one.form.request(one).body


def test_types_by_first_bytes():
    """What a file is called does not matter."""
    heads = {
        PNG: "image/png", b"\xff\xd8\xff\xe1": "image/jpeg", b"GIF87a": "image/gif", b"RIFF1234WEBPVP8 ": "image/webp",
        b"RIFF1234WAVEfmt ": "audio/wav", b"ID3\3": "audio/mpeg", b"\xff\xfb\x90": "audio/mpeg", b"fLaC": "audio/flac",
        b"OggS": "audio/ogg", b"\0\0\0\x20ftypM4A ": "audio/mp4", b"%PDF-1.4": "application/pdf",
        b"": None, b"RIFF1234AVI ": None, b"<svg>": None, b"\xff\xf1\x50": None, b"\0\0\0\x20ftypisom": None,
    }  # fmt: skip
    assert {head: type_of(head) for head in heads} == heads


def test_a_column_of_the_input_is_no_fault_of_sealing():
    """A member with the reserved name but another value is refused alone, and ends no job."""
    for value in (b"7", b'["my_code","x"]', b"null", b'["media_missing"]'):
        error = fault_of({FAULT: msgspec.Raw(value)})
        assert error is not None and error.code == "column_conflict"
    assert fault_of({FAULT: msgspec.Raw(b'["media_missing","gone"]')}) == RowError("media_missing", "gone")


def test_a_url_is_noted_and_not_fetched(tmp_path):
    """A row has it once more, if it is not too long; what it leads to is not known."""
    cells = ["https://a.example/b.png?c", "HTTP://169.254.169.254/", "https://a.example/" + "x" * 2048]
    rows = b"".join(msgspec.json.encode({"img": cell}) + b"\n" for cell in cells)
    adder = MediaAdder([MediaColumn("image", "img")], DatasetSpec([]), tmp_path / "home")
    (added,) = adder.add(
        iter([Converted(rows)]), SourceFile(str(tmp_path / "in.jsonl"), "jsonl", None), are_whole_lines=True
    )
    lines = [split_object(line) for line in added.data.splitlines()]
    assert [media_of(line) for line in lines[:2]] == [
        [MediaPart("image", url=cell, column="img")] for cell in cells[:2]
    ]
    fault = fault_of(lines[2])
    assert fault is not None and fault.code == "media_not_allowed" and len(fault.message) < 200


def test_a_caller_of_a_server_names_no_file(tmp_path):
    """Without a `media_folder`, which only this machine's own commands set, no spelling of a path is read."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    cells = [str(path), "a.png", f"file:{path}", f"file://{path}", f"//{path}", {"bytes": None, "path": str(path)}]
    rows = b"".join(msgspec.json.encode({"img": cell}) + b"\n" for cell in cells)
    adder = MediaAdder([MediaColumn("image", "img")], DatasetSpec([]), tmp_path / "home")
    source = SourceFile(str(tmp_path / "in.jsonl"), "jsonl", None)
    (added,) = adder.add(iter([Converted(rows)]), source, are_whole_lines=True)
    faults = [fault_of(split_object(line)) for line in added.data.splitlines()]
    assert [fault and fault.code for fault in faults] == ["media_not_allowed"] * len(cells)


def test_a_file_that_is_copied_is_read_once(tmp_path, monkeypatch):
    """Rows that name it follow each other; one whose file has changed gets the new content, and one whose file changes
    while it is read an error that names it."""
    path, reads, kept = tmp_path / "a.png", [], []

    def read(place: str, bytes_max: int) -> bytes:
        reads.append(place)
        return read_file(place, bytes_max)

    monkeypatch.setattr(adding, "read_file", read)
    spec = DatasetSpec([], media_folder=str(tmp_path), media_copies="folder")
    adder = MediaAdder([MediaColumn("image", "img")], spec, tmp_path / "home", lambda *copy: kept.append(copy))

    def parts(count: int) -> list[MediaPart]:
        rows = b'{"img":"a.png"}\n' * count
        (added,) = adder.add(iter([Converted(rows)]), SourceFile("/in.jsonl", "jsonl", None), are_whole_lines=True)
        return [part for line in added.data.splitlines() for part in media_of(split_object(line))]

    path.write_bytes(PNG)
    expected = MediaPart("image", "image/png", len(PNG), blake3(PNG).hexdigest(), path=str(path), is_copied=True)
    assert (parts(3), reads, kept) == ([expected] * 3, [str(path)], [(expected.digest, PNG)])
    path.write_bytes(PNG + b"!")
    assert [part.digest for part in parts(2)] == [blake3(PNG + b"!").hexdigest()] * 2 and len(kept) == 2


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    """No content is taken that may be half of one and half of another."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)

    class ChangingFile(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            path.write_bytes(PNG + b"!")
            return data

    monkeypatch.setattr(files.os, "fdopen", lambda fd, _: ChangingFile(io.FileIO(fd)))
    with pytest.raises(InvalidRow, match="a.png' changed while it was read") as refused:
        read_file(str(path), 100)
    assert refused.value.code == "media_changed"


def test_a_copy_that_is_not_what_was_written(tmp_path):
    """A row whose copy is gone or damaged fails alone, and names the file it was made of."""
    part = MediaPart("image", "image/png", len(PNG), blake3(PNG).hexdigest(), path="/home/ada/a.png", is_copied=True)
    copy = Path(path_of(str(tmp_path), part.digest))
    reader = CopyReader()
    copy.parent.mkdir()
    copy.write_bytes(PNG)
    assert reader.read(part, str(tmp_path)) == PNG
    for damage in (lambda: copy.write_bytes(PNG[:-1] + b"?"), lambda: copy.write_bytes(PNG + b"?"), copy.unlink):
        damage()
        with pytest.raises(InvalidRow, match="the copy of the image a.png .* cannot be used") as refused:
            reader.read(part, str(tmp_path))
        assert refused.value.code == "media_missing"
    with pytest.raises(InvalidRow, match="could not be read: this worker knows no object store") as refused:
        reader.read(part, "jobs/job_1/media/")
    assert refused.value.code == "media_unavailable"
