"""Imports of many modules at once."""

import gc
import weakref

from batchmill.imports import import_large


class Circle:
    def __init__(self):
        self.itself = self


def test_a_module_that_is_there_keeps_no_garbage():
    """What a process has made since stays collectable: a child imports its work before each piece of it."""
    circle = weakref.ref(Circle())
    import_large("batchmill.imports")
    gc.collect()
    assert circle() is None
