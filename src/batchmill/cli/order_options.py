"""The options that say what to run, shared by `run` and the commands that only look, and the order they make."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from batchmill.cli.session import Session, global_options
from batchmill.config import Config
from batchmill.datasets import sources
from batchmill.errors import InvalidInput
from batchmill.models.registry import ModelFlags, resolve
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, Policy

C = TypeVar("C", bound=Callable[..., Any])
COUNT = click.IntRange(min=1)
MORE_THAN_NOTHING = click.FloatRange(min=0, min_open=True)

ORDER_OPTIONS = (
    click.argument("inputs", metavar="INPUT...", nargs=-1, required=True),
    click.option("--model", "models", metavar="NAME", multiple=True, required=True,
                 help="A model of the configuration, or ENGINE:SOURCE. Several: the first is the default."),
    click.option("-o", "--output", metavar="FILE", help="The result file; its name says jsonl, csv or parquet."),
    click.option("--format", "format_", type=click.Choice(["openai", "jsonl", "csv", "parquet"]),
                 help="What the input is, where it is not as it looks."),
    click.option("--prompt", metavar="TEXT", help="The prompt of each row of a table, with {column} in it."),
    click.option("--system", metavar="TEXT", help="The system prompt, likewise."),
    click.option("--url", metavar="PATH", help="The path the prompts go to [/v1/chat/completions]."),
    click.option("--param", "params", metavar="KEY=VALUE", multiple=True,
                 help="A further field of each request; VALUE is JSON, or text."),
    click.option("--on-invalid", type=click.Choice(["fail", "skip"]), default="fail", show_default=True,
                 help="With bad rows: run none, or give them error results."),
    click.option("--dedupe", is_flag=True, help="Run identical requests once even if their answers may vary."),
    click.option("--copy", is_flag=True, help="Keep a copy of the input with the job."),
    click.option("--adapter", "adapters", metavar="NAME=PATH", multiple=True, help="A LoRA adapter for rows to name."),
    click.option("--base-url", metavar="URL", help="The address of an OpenAI-compatible service."),
    click.option("--api-key-env", metavar="NAME", help="The environment variable that holds its key."),
    click.option("--engine-arg", "engine_args", metavar="KEY=VALUE", multiple=True, help="A flag of the engine."),
    click.option("--python", metavar="FILE", help="The interpreter of the environment the engine lives in."),
    click.option("--workers", "--replicas", "workers", type=COUNT, help="Processes; copies of an engine server."),
    click.option("--rpm", type=COUNT, help="Requests a minute at most."),
    click.option("--tpm", type=COUNT, help="Tokens a minute at most."),
    click.option("--in-flight", type=COUNT, help="Rows sent and not yet answered at most, for each worker."),
    click.option("--timeout", type=MORE_THAN_NOTHING, metavar="S", help="Seconds one call may take."),
)  # fmt: skip


def order_options(command: C) -> C:
    """Add the options of ORDER_OPTIONS and the global ones."""
    command = global_options(command)
    for option in reversed(ORDER_OPTIONS):
        command = option(command)
    return command


def build_order(session: Session, config: Config, options: dict[str, Any]) -> JobOrder:
    """The order that the options of a command line make. Raises: InvalidInput."""
    models = _models(session, config, options)
    budget = options.get("budget")
    if budget is not None and all(model.price is None for model in models):
        raise InvalidInput(
            f"--budget needs a price: give models.{models[0].name}.price in the configuration", code="unknown_price"
        )
    output = options["output"]
    return JobOrder(
        dataset=DatasetSpec(
            paths=sources.resolve(list(options["inputs"])),
            format=options["format_"],
            copy=options["copy"],
            line_bytes_max=config.limits.line_bytes_max,
            depth_max=config.limits.depth_max,
        ),
        models=models,
        prompt=options["prompt"],
        system=options["system"],
        url=options["url"],
        params={name: _json_or_text(value) for name, value in _pairs(options["params"], "--param").items()},
        policy=Policy(on_invalid=options["on_invalid"], dedupe=options["dedupe"], budget=budget),
        output=None if output is None else os.path.abspath(session.cwd / Path(output).expanduser()),
        restart=options.get("restart", False),
        overwrite=options.get("overwrite", False),
    )


def _models(session: Session, config: Config, options: dict[str, Any]) -> list[ModelSpec]:
    key = options["api_key_env"]
    args = {name: _scalar(value) for name, value in _pairs(options["engine_args"], "--engine-arg", bare="true").items()}
    flags = ModelFlags(
        adapters=_pairs(options["adapters"], "--adapter"),
        engine_args={name.removeprefix("--"): value for name, value in args.items()},
        base_url=options["base_url"],
        api_key=None if key is None else f"env:{key}",
        python=options["python"],
        workers=options["workers"],
        requests_per_minute=options["rpm"],
        tokens_per_minute=options["tpm"],
        in_flight_max=options["in_flight"],
        attempt_timeout_s=options["timeout"],
    )
    names = options["models"]
    if len(names) > 1 and flags != ModelFlags():
        raise InvalidInput("with several --model, say in the configuration what holds for which: flags fit one only")
    models = [resolve(name, config, cwd=session.cwd, flags=flags) for name in names]
    for at, model in enumerate(models):
        if model.name in [other.name for other in models[:at]]:
            raise InvalidInput(f"two models are called {model.name!r}: name them in the configuration")
    return models


def _pairs(texts: tuple[str, ...], flag: str, bare: str | None = None) -> dict[str, str]:
    """KEY=VALUE texts; `bare` stands for the value of a KEY alone."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and bare is None):
            raise InvalidInput(f"{flag} is given as KEY=VALUE, not {text!r}")
        if name in found:
            raise InvalidInput(f"{flag} {name} is given twice")
        found[name] = value if equals else str(bare)
    return found


def _scalar(text: str) -> str | int | float | bool:
    """A flag's value as it would stand in the configuration."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        # "007", "1_000", "inf" and "1.50" are texts: a flag must reach the engine as it was written.
        return value if math.isfinite(value) and str(value) == text else text
    return text


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
