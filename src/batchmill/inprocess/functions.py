"""Functions of a program as models. Their code becomes a file that the function process loads, as for a deployment.

A function of a module is named where it lies. One of a notebook or script is written down with all that it names; what
cannot be written down is pickled, and unpickled by processes of this machine's user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from batchmill.client.captured import Collected, capture
from batchmill.datasets.spooled_inputs import FUNCTIONS
from batchmill.errors import InvalidInput
from batchmill.function_runtime.loading import LoadError
from batchmill.function_runtime.user_code import parameters_of
from batchmill.inprocess.identity import digest_of
from batchmill.optional import require
from batchmill.part_files import make_folder, sync_folder, sync_tree
from batchmill.services.data_dirs import data_dirs

PICKLED = "function.pickle"
LOADER = "source.py"
DIGEST_CHARS = 32
UNCAPTURABLE = "uncapturable"

_LOADER = '''\
"""A function that holds more than source can say; batchmill made this file."""

import pickle
import sys
from pathlib import Path

sys.path[:0] = [each for each in {path!r} if each not in sys.path]
{name} = pickle.loads(Path(__file__).with_name({pickled!r}).read_bytes())
'''


class FunctionFiles:
    """Writes functions to files of a data directory. Args: data_dir: it is made if it is not there."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def source_of(self, function: Callable[..., Any]) -> str:
        """`FILE.py:NAME` of a function or class. The same function is the same file, also after a restart.

        Raises: InvalidInput for one that rows cannot call, or that can neither be written down nor pickled.
        """
        if not isinstance(function, type):
            _check_parameters(function)
        try:
            collected = capture(function)
        except InvalidInput as error:
            if error.code != UNCAPTURABLE:
                raise
            return self._pickled(function, error)
        if collected.base is not None:  # of a module: it runs where it lies, beside its own files
            return str(collected.base / collected.target)
        return self._written(collected)

    def _written(self, collected: Collected) -> str:
        contents = {place: _content(each) for place, each in collected.files.items()}
        digest = hashlib.sha256()
        for place, content in sorted(contents.items()):
            digest.update(f"{place}\0{len(content)}\0".encode() + content)
        return f"{self._store(digest.hexdigest(), contents)}/{collected.target}"

    def _pickled(self, function: Callable[..., Any], why: InvalidInput) -> str:
        """Raises: InvalidInput with both reasons."""
        cloudpickle = require("cloudpickle", f"{why.message}, so it must be pickled, which", InvalidInput)
        try:
            data = cloudpickle.dumps(function)
        except Exception as error:  # user code: its __reduce__
            raise InvalidInput(
                f"{why.message}; nor can it be pickled: {type(error).__name__}: {error}", code=UNCAPTURABLE
            ) from None
        name = _name_of(function)
        path = [os.path.abspath(each) for each in sys.path if each and os.path.isdir(each)]
        loader = _LOADER.format(path=[os.getcwd(), *path], name=name, pickled=PICKLED)
        folder = self._store(digest_of(function), {LOADER: loader.encode(), PICKLED: data})
        return f"{folder}/{LOADER}:{name}"

    def _store(self, digest: str, contents: Mapping[str, bytes]) -> Path:
        """The folder with these files, which appears whole."""
        folder = self._data_dir / FUNCTIONS / digest[:DIGEST_CHARS]
        with contextlib.suppress(FileNotFoundError):
            os.utime(folder)  # a sweep leaves it to the job to come
            return folder
        data_dirs.prepare_data_dir(self._data_dir)
        make_folder(folder.parent)
        part = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        try:
            for place, content in contents.items():
                path = part / place
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(content)
            sync_tree(part)
            try:
                part.rename(folder)
                sync_folder(folder.parent)
            except OSError:  # another process was first
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return folder


def _check_parameters(function: Callable[..., Any]) -> None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    try:
        parameters_of(function, f"{module}.{name}" if module else name)
    except LoadError as error:
        raise InvalidInput(str(error), code="invalid_function") from None


def _content(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _name_of(function: Callable[..., Any]) -> str:
    """The name of the model: the function's own, if it has one."""
    target = function if isinstance(function, FunctionType | type) else getattr(function, "__func__", function)
    name = getattr(target, "__name__", type(function).__name__)
    return name if name.isidentifier() else "predict"
