"""What every object store promises. A subclass gives an empty one as the fixture `store`."""

from pathlib import Path

import pytest

from batchmill.errors import Conflict, InputChanged, InvalidInput, TooLarge
from batchmill.object_store.store import RANGE_BYTES, ObjectStore
from batchmill.object_store.urls import ObjectInfo

LARGE = bytes(range(256)) * (RANGE_BYTES // 256) + b"the end"


class ObjectStoreSuite:
    def test_an_object_is_read_as_it_was_put(self, store: ObjectStore):
        """What was put is there with its size and content, and nothing else is."""
        put = store.put("a/b.txt", b"content")
        info = store.head("a/b.txt")
        assert (info.key, info.size_bytes, put.size_bytes) == ("a/b.txt", 7, 7)
        assert info.etag == put.etag
        assert store.get("a/b.txt", size_max=7) == b"content"
        assert bytes(store.get_range(info, 2, 5)) == b"nte"
        assert store.find("a/b") is None
        assert [each.key for each in store.list()] == ["a/b.txt"]

    def test_limits(self, store: ObjectStore):
        """An object of the greatest size is read, one byte more is refused; an empty one has no ranges."""
        store.put("seven", b"content")
        store.put("none", b"")
        assert store.get("seven", size_max=7) == b"content"
        with pytest.raises(TooLarge):
            store.get("seven", size_max=6)
        assert store.get("none", size_max=0) == b""

    def test_what_is_not_there(self, store: ObjectStore):
        """A missing object is the caller's error, named by its URL; removing it is none."""
        for call in (store.head, lambda key: store.get(key, size_max=1)):
            with pytest.raises(InvalidInput, match=r"there is no object .*/no/such") as caught:
                call("no/such")
            assert caught.value.code == "no_object"
        store.delete("no/such")

    def test_put_creates(self, store: ObjectStore):
        """A name is given once: other content is a conflict, the same content is what was asked for."""
        first = store.put("k", b"first")
        assert store.put("k", b"first").etag == first.etag
        for other in (b"other", b"longer than it"):
            with pytest.raises(Conflict, match="exists, with other content") as caught:
                store.put("k", other)
            assert caught.value.code == "object_exists"
        assert store.get("k", size_max=100) == b"first"
        store.put("k", b"second", overwrite=True)
        assert store.get("k", size_max=100) == b"second"

    def test_a_changed_object_is_not_read(self, store: ObjectStore):
        """Bytes of an object that was replaced are never returned as those of the one that was seen."""
        store.put("k", b"content")
        info = store.head("k")
        store.put("k", b"CONTENT", overwrite=True)
        with pytest.raises(InputChanged, match="/k changed since it was sealed"):
            store.get_range(info, 0, 7)
        store.put("k", b"longer content", overwrite=True)
        with pytest.raises(InputChanged):
            store.get_range(info, 0, 7)

    def test_replacing_what_was_seen(self, store: ObjectStore):
        """An object is replaced only while it is the one that was seen; the same content again is fine."""
        store.put("k", b"first")
        seen = store.head("k")
        second = store.put("k", b"second", replaced=seen)
        assert store.put("k", b"second", replaced=seen).etag == second.etag == store.head("k").etag
        with pytest.raises(Conflict):
            store.put("k", b"third!", replaced=seen)
        assert store.get("k", size_max=9) == b"second"
        store.put("k", b"third!", replaced=second)
        store.delete("k")
        with pytest.raises(Conflict):
            store.put("k", b"fourth", replaced=second)
        assert store.find("k") is None

    def test_large_files(self, store: ObjectStore, tmp_path: Path):
        """A file of several ranges arrives whole, a small one too."""
        (tmp_path / "large").write_bytes(LARGE)
        (tmp_path / "small").write_bytes(b"small")
        assert store.put_file("large", tmp_path / "large").size_bytes == len(LARGE)
        info = store.head("large")
        pieces = list(store.read(info))
        assert [len(each) for each in pieces] == [RANGE_BYTES, 7]
        assert b"".join(pieces) == LARGE
        assert store.put_file("small", tmp_path / "small").size_bytes == 5
        assert store.get("small", size_max=5) == b"small"

    def test_lists(self, store: ObjectStore):
        """A list is sorted, and holds what begins with the prefix and comes after a key."""
        keys = ["a/1", "a/10", "a/2", "ab", "b/c/d", "ü z"]
        for key in reversed(keys):
            store.put(key, b"x")
        assert [each.key for each in store.list()] == keys
        assert [each.key for each in store.list("a/")] == ["a/1", "a/10", "a/2"]
        assert [each.key for each in store.list("a")] == ["a/1", "a/10", "a/2", "ab"]
        assert [each.key for each in store.list("a/1")] == ["a/1", "a/10"]
        assert [each.key for each in store.list("a/", after="a/1")] == ["a/10", "a/2"]
        assert list(store.list("zz")) == []
        store.delete("a/1", "a/10", "nothing")
        assert [each.key for each in store.list("a/")] == ["a/2"]

    def test_objects_are_removed_together(self, store: ObjectStore):
        """Any number, those with strange names too, and those that are not there."""
        keys = ["a b", "50%", "x%20y", "deep/er", *(f"n{number}" for number in range(9))]
        for key in [*keys, "stays"]:
            store.put(key, b"x")
        store.delete(*keys, "nothing")
        assert [each.key for each in store.list()] == ["stays"]
        store.delete()

    def test_lists_end(self, store: ObjectStore):
        """A list that would look at more objects than it may is refused, however few begin with the prefix."""
        for number in range(3):
            store.put(f"a{number}", b"x")
        assert len(list(store.list("a", listed_max=3))) == 3

    def test_names(self, store: ObjectStore):
        """Names with spaces, percent signs and other letters stay as they are; those without a meaning are refused."""
        for key in ("a b", "50%", "x%20y", "q#z", "w?v", "ключ"):
            store.put(key, key.encode())
            assert store.get(key, size_max=100) == key.encode()
        for key in ("a//b", "../a", "a/./b", "a\nb", "k" * 1025):
            with pytest.raises(InvalidInput) as caught:
                store.put(key, b"x")
            assert caught.value.code == "invalid_url"

    def test_an_object_that_never_was(self, store: ObjectStore):
        """An object that is gone by the time it is read is not there."""
        with pytest.raises(InvalidInput):
            store.get_range(ObjectInfo("gone", 5), 0, 5)
