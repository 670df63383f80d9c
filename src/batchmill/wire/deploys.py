"""What is said when a function is deployed: beside its code, in the archive that carries both, and in the replies."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from batchmill.types import ModelSpec

BUNDLE_MEDIA = "application/vnd.batchmill.bundle+gzip"  # no web page can send it to a server unasked
REQUIREMENTS_CHARS_MAX = 200_000
EXAMPLES_MAX = 100


class DeployOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """How the code that comes with it is to be called, in what environment, under what name."""

    name: str
    target: str  # "app.py:fn"; the file is relative to the folder of code
    branch: str = "main"
    source: str = ""  # for people: app.py:fn, a git URL at its revision
    requirements: str | None = None  # the text of a requirements file; None: no environment of its own
    python: str | None = None  # an interpreter's path, or "3.11"; None: batchmill's own
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}  # variable -> "env:NAME", "file:PATH" or "secret:NAME", at the server
    workers: int = 1
    gpus: int = 0
    memory_bytes: int | None = None
    timeout_s: float | None = None
    batch_size: int = 0
    batch_window_s: float = 0.0
    frame_columns: list[str] = []
    is_idempotent: bool = False
    received_shapes: bool = False
    examples: list[Any] = []  # arguments by name (an object) or by position (a list): each is called before it counts
    is_shared: bool | None = None  # other projects may call it; None: as before, else only if no key brings it
    has_samples: bool = False  # input.json or output.json was given by name: the code must be one that has use for it


class ModelVersion(Struct, frozen=True):
    """A version of a deployed function. States: building, ready, failed, removed."""

    name: str
    branch: str
    number: int
    state: str
    created: float
    finished: float | None = None
    source: str = ""
    error: str | None = None  # why it failed: the traceback
    spec: ModelSpec | None = None  # once it is ready
    project: str = "default"  # whose it is
    key: str | None = None  # the public id of the key that brought it; None: whoever runs the machine
    is_shared: bool = True  # other projects may call it

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.branch}/{self.number}"


class Backend(Struct, frozen=True, array_like=True):
    """One of the versions that an alias stands for."""

    branch: str
    number: int
    weight: float = 1.0


class Route(Struct, frozen=True):
    """What a branch's `latest` or an alias ("@prod") stands for."""

    name: str
    label: str
    backends: list[Backend]
    mirrors: list[Backend] = []  # get copies of the calls, and their answers go nowhere
    changed: float = 0.0


class Deployed(Struct, frozen=True):
    """What became of a deployment."""

    version: ModelVersion
    is_new: bool  # false: the newest version is this very code and these settings already
