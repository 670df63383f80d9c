"""The keywords of the client's methods as types, so that an editor completes them and a type checker knows them.

Each repeats the fields of a struct of `wire`, which checks the values; a test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from batchmill.wire.native import Format, Labels, MoreThanNothing, Name, OutputFormat, Priority
from batchmill.wire.native_llms import Adapters, Args, Text, Token

Path = str | os.PathLike[str]


class WorkOptions(TypedDict, total=False):
    """What is computed of each row: the fields of `wire.native.Work`."""

    model: Name  # short for `models` with one name
    models: list[Name]  # the first is for rows that name none; empty: all
    format: Format | None  # None: seen from the file's name and first row
    prompt: str | None  # of each row of a table, with {column} in it
    system: str | None
    url: str | None  # the path that prompts go to
    params: dict[str, Any]  # further fields of each request that a prompt makes
    on_invalid: Literal["fail", "skip"]  # with bad rows: run none, or give them error results
    dedupe: bool  # run identical requests once even where their answers may vary
    deadline: MoreThanNothing | None  # seconds since the epoch, UTC


class JobOptions(WorkOptions, total=False):
    """How a job runs: the fields of `wire.native.NewJob`."""

    budget: MoreThanNothing | None  # USD; the job pauses when so much is spent
    priority: Priority  # jobs of a higher one go first
    completion_s: float | None  # the deadline, in seconds from now
    labels: Labels
    output_format: OutputFormat
    together: bool  # OpenAI rows that failed stand among the others, in the order of the input


class DeployOptions(TypedDict, total=False):
    """How a function is deployed: the fields of `wire.deploys.DeployOrder` that its code does not say."""

    name: str
    branch: str
    requirements: str | None  # a file or its text; None: no environment of its own
    python: str | None  # an interpreter's path, or "3.11"; None: the server's own
    environment: dict[str, str]
    secrets: dict[str, str]  # variable -> "env:NAME", "file:PATH" or "secret:NAME", at the server
    workers: int
    gpus: int
    memory_bytes: int | None
    timeout_s: float | None
    batch_size: int
    batch_window_s: float
    frame_columns: list[str]
    is_idempotent: bool
    received_shapes: bool
    examples: list[Any]  # arguments by name (an object) or by position (a list): each is called before it counts
    is_shared: bool | None  # other projects may call it
    include: Sequence[str]  # further files and folders, globs too
    input_json: Path | None
    output_json: Path | None
    dataframe_mode: bool
    example_dataframe: Any  # a data frame or its columns


class _LlmSettings(TypedDict, total=False):
    engine_args: Args
    hf_token: Token | None  # shown to the model hub; kept encrypted
    replicas_min: int | None
    replicas_max: int | None
    cooldown_s: float | None  # an idle replica ends after so long
    scale_up_requests: int | None  # another one starts above so many requests a replica
    memory_bytes: int | None  # what one replica takes of the machine
    gpus: int | None
    takes_adapters: bool
    preloaded_adapters: Adapters
    description: Text | None


class LlmOptions(_LlmSettings, total=False):
    """How a language model is served: the fields of `wire.native_llms.NewLlm`."""


class LlmChanges(_LlmSettings, total=False):
    """What changes of a deployed language model: the fields of `wire.native_llms.LlmChange`."""

    base_model: Name
