"""Archives of code: read with nothing trusted."""

import gzip
import io
import tarfile

import pytest

from batchmill.errors import InvalidInput, TooLarge
from batchmill.wire import adapter_bundles, bundles

ORDER = b'{"name":"f","target":"app.py:f"}'


def packed(*members):
    """An archive of names and their contents (or, in a list, their kinds) behind a sound order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in (("deploy.json", ORDER), *members):
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content[0], "/etc/passwd"
                archive.addfile(info)
    out.seek(0)
    return out


@pytest.mark.parametrize(
    "members",
    [
        [("code/../x", b"")], [("/etc/x", b"")], [("code//etc/x", b"")], [("code/a/../../x", b"")], [("x", b"")],
        [("code/x", [tarfile.SYMTYPE])], [("code/x", [tarfile.LNKTYPE])], [("code/x", [tarfile.CHRTYPE])],
        [("code/x", [tarfile.FIFOTYPE])], [("code/a", b""), ("code/a", b"")], [("code/a", b""), ("code/a/b", b"")],
        [("code/a\\b", b"")], [("code/a\nb", b"")], [("code/", b"")], [("code/" + "x" * 1001, b"")],
    ],
)  # fmt: skip
def test_members_that_lie_elsewhere_are_refused(tmp_path, members):
    """Links, devices, absolute paths, ways out, doubles and odd names are refused, and nothing lies outside."""
    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidInput) as caught:
        bundles.read(packed(*members), tmp_path / "in")
    assert caught.value.code == "invalid_bundle"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("data", [b"", b"no gzip", gzip.compress(b"no tar"), gzip.compress(b"\0" * 4096)])
def test_what_is_no_archive_is_refused(tmp_path, data):
    """Bytes that are not a tar.gz, or one without its order, are refused in one way."""
    with pytest.raises(InvalidInput, match="not a bundle of code"):
        bundles.read(io.BytesIO(data), tmp_path)


@pytest.mark.parametrize("module", [bundles, adapter_bundles])
def test_headers_without_end_are_refused(tmp_path, module):
    """A few kilobytes that are headers of headers of headers are not an archive either."""
    head = tarfile.TarInfo("x")
    head.type, record = tarfile.XHDTYPE, b"14 comment=aa\n"
    head.size = len(record)
    data = gzip.compress((head.tobuf(tarfile.PAX_FORMAT) + record.ljust(tarfile.BLOCKSIZE, b"\0")) * 3000)
    with pytest.raises(InvalidInput) as caught:
        module.read(io.BytesIO(data), tmp_path)
    assert caught.value.code == "invalid_bundle"


def test_limits_hold_at_their_value_and_beyond(tmp_path, monkeypatch):
    """As many files and bytes as are allowed are taken; one more is refused."""
    monkeypatch.setattr(bundles, "FILES_MAX", 2)
    monkeypatch.setattr(bundles, "BYTES_MAX", 10)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    bundles.read(packed(("code/x", b"1" * 5), ("code/y", b"1" * 5)), tmp_path / "a")
    with pytest.raises(TooLarge):
        bundles.read(packed(("code/x", b"1" * 5), ("code/y", b"1" * 6)), tmp_path / "b")
    with pytest.raises(TooLarge):
        bundles.read(packed(("code/x", b""), ("code/y", b""), ("code/z", b"")), tmp_path / "c")


def test_a_header_cannot_fill_the_memory(tmp_path):
    """A member's extended header of many megabytes is refused before it is read."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("deploy.json")
        info.size = len(ORDER)
        archive.addfile(info, io.BytesIO(ORDER))
        info = tarfile.TarInfo("code/x")
        info.pax_headers = {"comment": "x" * 1_000_000}
        archive.addfile(info, io.BytesIO(b""))
    out.seek(0)
    with pytest.raises(InvalidInput, match="header"):
        bundles.read(out, tmp_path)


def test_only_a_file_that_may_be_run_may_be_run(tmp_path):
    """Of the modes of files only whether their owner may run them counts."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content, mode in (("deploy.json", ORDER, 0o600), ("code/run", b"x", 0o4777), ("code/not", b"x", 0)):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))
    out.seek(0)
    bundles.read(out, tmp_path)
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("run", "not")] == [0o755, 0o644]
