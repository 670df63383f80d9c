"""`batchmill models`: what rows and requests can be sent to."""

from __future__ import annotations

import click

from batchmill.cli.session import EXIT_OK, Session, global_options
from batchmill.cli.text import clean, table
from batchmill.types import Price
from batchmill.wire.native import ModelInfo

NAME_CHARS_MAX = 80


@click.command()
@global_options
@click.pass_obj
def models(session: Session) -> int:
    """List the models of the configuration, or with --server those that your key may use."""
    return session.run(_models(session))


async def _models(session: Session) -> int:
    found = await session.app.models(session.config())
    if session.as_json:
        for model in found:
            session.emit("model", model=model)
        return EXIT_OK
    if not found:
        session.print("there are no models: name some in batchmill.toml, as [models.NAME]")
        return EXIT_OK
    head = ["NAME", "ENGINE", "ADAPTERS", "USD PER MILLION TOKENS"]
    for line in table([head, *(_columns(model) for model in found)]):
        session.print(line)
    return EXIT_OK


def _columns(model: ModelInfo) -> list[str]:
    adapters = ", ".join(clean(name, NAME_CHARS_MAX) for name in model.adapters)
    return [clean(model.name, NAME_CHARS_MAX), model.engine, adapters or "-", _priced(model.price)]


def _priced(price: Price | None) -> str:
    if price is None:
        return "-"
    cached = "" if price.cached is None else f", {price.cached:g} cached"
    return f"{price.input:g} in{cached}, {price.output:g} out"
