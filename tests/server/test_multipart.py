"""Forms that arrive piece by piece."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.errors import InvalidInput
from batchmill.server import multipart
from batchmill.server.multipart import FIELD_BYTES_MAX, PARTS_MAX, read_form

TYPE = "multipart/form-data; boundary=bnd"
# What a boundary is made of, so that many contents hold almost one.
CRUMBS = [b"\r", b"\n", b"-", b"--bnd", b"\r\n--bn", b"\r\n--b", b"\r\n", b"x", b"", b"yy" * 40]


def part(name: str, value: bytes, *more: str) -> bytes:
    head = [f'Content-Disposition: form-data; name="{name}"{more[0] if more else ""}', *more[1:]]
    return b"--bnd\r\n" + "\r\n".join(head).encode() + b"\r\n\r\n" + value + b"\r\n"


def file_part(value: bytes, name: str = "file") -> bytes:
    return part(name, value, '; filename="a.jsonl"', "Content-Type: text/x")


class Read:
    """A form as it was read."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, str]] = []
        self.pieces: list[bytes] = []

    async def of(self, chunks: list[bytes], content_type: str = TYPE):
        async def arriving():
            for chunk in chunks:
                yield chunk

        async def keep(piece: bytes) -> None:
            self.pieces.append(piece)

        return await read_form(
            arriving(),
            content_type,
            file_field="file",
            take_field=lambda name, value: self.fields.append((name, value)),
            take_piece=keep,
        )


async def refusal(body: bytes, content_type: str = TYPE) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        await Read().of([body], content_type)
    return caught.value


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(CRUMBS), max_size=30).map(b"".join), st.integers(0, 2**32))
async def test_a_file_arrives_byte_for_byte(content, seed):
    """However a body is cut, the file is what was sent, even where it looks almost like a boundary."""
    if b"\r\n--bnd" in b"\r\n" + content:
        return
    body = part("purpose", b"batch") + file_part(content) + part("late", b"er") + b"--bnd--\r\n"
    chunks, cut = [], random.Random(seed)
    while body:
        size = cut.choice([1, 2, 3, 5, 60, 500])
        chunks.append(body[:size])
        body = body[size:]
    read = Read()
    found = await read.of(chunks)
    assert (b"".join(read.pieces), found.filename, found.media) == (content, "a.jsonl", "text/x")
    assert read.fields == [("purpose", "batch"), ("late", "er")]


# What short forms are made of, and what is almost one.
BITS = [
    part("purpose", b"batch"), file_part(b"x\r\n--bn"), file_part(b""), part("late", b""), b"--bnd--\r\n", b"--bnd--",
    b"--bnd\r\n", b"--bnd \r\n", b"--bnd", b"\r\n", b"\n", b"A: b\r\n",
    b"A:b\r\n\r\n", b": b\r\n\r\n", b"A : b\r\n\r\n",
    b'Content-Disposition: form-data; name="n"\r\n', b"\r\n\r\n", b"x", b"--", b"\x00", b"\xff",
    part("n", b"v", "", "A: 1", "a: 2"), part("n", b"v", "", *[f"H{n}: 1" for n in range(8)]),
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(BITS), max_size=8).map(b"".join))
async def test_a_short_form_is_read_at_once_as_by_the_parser(body):
    """A form that is here whole gives what it gives byte by byte: the same fields, the same file, the same refusal."""

    async def outcome(chunks: list[bytes]) -> object:
        read = Read()
        try:
            found = await read.of(chunks)
        except InvalidInput as error:
            return error.code
        return found, read.fields, b"".join(read.pieces)

    body = b"--bnd\r\n" + body.removeprefix(b"--bnd\r\n")
    assert await outcome([body]) == await outcome([body[at : at + 1] for at in range(len(body))])


@pytest.mark.parametrize("first", [[0], [0, 10]])
async def test_nothing_counts_after_the_last_boundary(first):
    """Bytes that follow a form in a later piece are ignored, even a second form, parsed or not."""
    form = part("purpose", b"batch") + file_part(b"{}\n") + b"--bnd--\r\n"
    read = Read()
    found = await read.of([form[start:end] for start, end in zip(first, [*first[1:], None], strict=True)] + [form])
    assert (found.filename, read.fields, b"".join(read.pieces)) == ("a.jsonl", [("purpose", "batch")], b"{}\n")


async def test_a_usual_form_is_not_parsed(monkeypatch):
    """The form of a short upload, as clients send it, is read without the parser."""
    monkeypatch.setattr(multipart.MultipartParser, "write", None)
    read = Read()
    found = await read.of([part("purpose", b"batch") + file_part(b"{}\n") + b"--bnd--\r\n"])
    assert (found.filename, read.fields, read.pieces) == ("a.jsonl", [("purpose", "batch")], [b"{}\n"])


@pytest.mark.parametrize("cut", [5, 60, 120, 190])
async def test_a_truncated_form_is_refused(cut):
    """A body that ends before its last boundary is not a form, wherever it ends."""
    body = part("purpose", b"batch") + file_part(b"x" * 80) + b"--bnd--\r\n"
    error = await refusal(body[:cut])
    assert error.code == "invalid_multipart" and "ends in the middle" in error.message


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=", "text/plain; b=1"]
)
async def test_a_form_says_what_it_is(content_type):
    """A body without the content type of a form, or without a boundary, is refused."""
    assert (await refusal(b"", content_type)).code in ("invalid_multipart", "unsupported_media_type")


async def test_a_boundary_has_a_limit():
    """A boundary of 70 characters is read, one of 71 refused."""
    long = "b" * 70
    body = (file_part(b"x") + b"--bnd--\r\n").replace(b"--bnd", b"--" + long.encode())
    await Read().of([body], f"multipart/form-data; boundary={long}")
    assert "boundary" in (await refusal(b"", f"multipart/form-data; boundary={long}b")).message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"--other\r\n\r\n", "cannot be read"),
        (b"hello", "cannot be read"),
        (b"", "ends in the middle"),
        (part("purpose", b"batch") + b"--bnd--\r\n", "'file'"),
        (file_part(b"1") + file_part(b"2") + b"--bnd--\r\n", "two files"),
        (b"--bnd\r\n\r\nx\r\n--bnd--\r\n", "Content-Disposition"),
        (b"--bnd\r\nContent-Disposition: attachment; name=file\r\n\r\nx\r\n--bnd--\r\n", "Content-Disposition"),
        (part("file", b"eA==", '; filename="x"', "Content-Transfer-Encoding: base64") + b"--bnd--", "is not supported"),
        (part("file", b"", "", "A: 1", "a: 2") + b"--bnd--", "two headers"),
        (part("file", b"", "", *[f"H{n}: 1" for n in range(9)]) + b"--bnd--", "cannot be read"),
        (part("purpose", b"\xff") + b"--bnd--", "not UTF-8"),
        (b'--bnd\r\nContent-Disposition: form-data; name="file"; filename="\xff"\r\n\r\n', "not UTF-8"),
    ],
)
async def test_what_is_no_proper_form(body, says):
    """Each flaw of a form is refused in words that name it."""
    assert says in (await refusal(body)).message


async def test_fields_have_a_limit():
    """A text field at its limit is read, one byte more is refused, whether it comes whole or in pieces."""
    end = file_part(b"") + b"--bnd--\r\n"
    read = Read()
    await read.of([part("f", b"x" * FIELD_BYTES_MAX) + end])
    assert len(read.fields[0][1]) == FIELD_BYTES_MAX
    body = part("f", b"x" * (FIELD_BYTES_MAX + 1)) + end
    assert "longer than" in (await refusal(body)).message
    with pytest.raises(InvalidInput, match="longer than"):
        await Read().of([body[n : n + 100] for n in range(0, len(body), 100)])


async def test_parts_have_a_limit():
    """A form has at most so many parts."""
    await Read().of([part("f", b"") * (PARTS_MAX - 1) + file_part(b"") + b"--bnd--"])
    assert "more than" in (await refusal(part("f", b"") * (PARTS_MAX + 1))).message


@pytest.mark.parametrize(
    "chunk", [b"line\n" * 1000, b"line\r\n" * 1000 + b"x", b"\r\n--bn" * 100 + b"x", bytes(range(256))]
)
async def test_a_chunk_without_a_boundary_is_not_copied(chunk):
    """The bytes of a file go on as the object they came in, whatever they are: nothing is parsed or copied."""
    read = Read()
    head = file_part(b"start")[: -len(b"\r\n")]
    await read.of([head, chunk, chunk, b"\r\n--bnd--\r\n"])
    assert read.pieces[0] == b"start" and read.pieces[1] is chunk and read.pieces[2] is chunk


def test_a_form_has_room_for_its_fields():
    """What a body may hold besides its file is more than every field and header together."""
    assert multipart.FORM_BYTES > PARTS_MAX * (FIELD_BYTES_MAX + multipart.HEADER_BYTES_MAX)
