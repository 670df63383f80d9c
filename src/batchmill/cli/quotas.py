"""`batchmill quotas`: what a project has of what it may have."""

from __future__ import annotations

import click

from batchmill.cli.llms import project_option
from batchmill.cli.session import Session, global_options
from batchmill.cli.text import table
from batchmill.types.machines import size_text
from batchmill.wire.native import QuotaInfo

DISK = "disk"  # the one that is in bytes


@click.command()
@project_option
@global_options
@click.pass_obj
def quotas(session: Session, project: str | None) -> int:
    """Show what a project has of everything that it has a quota of, and what it may have."""

    async def run() -> None:
        async with session.open(project) as opened:
            found = await opened.quotas()
        if session.as_json:
            for each in found:
                session.emit("quota", quota=each)
        else:
            for line in table([["QUOTA", "HAS", "MAY HAVE"], *map(_columns, found)]):
                session.print(line)

    return session.run(run())


def _columns(each: QuotaInfo) -> list[str]:
    shown = size_text if each.quota == DISK else "{:,}".format
    return [each.quota, shown(each.used), shown(each.most)]
