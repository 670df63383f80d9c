"""Secrets that are kept: put in, given out by name, rotated, never lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fakes.databases import databases, open_database
from fakes.held_clock import HeldClock

from batchmill import faults
from batchmill.config import KEY_FILE, Config
from batchmill.errors import Conflict, InvalidConfig, InvalidInput, ModelFailed, UnknownName
from batchmill.services.secrets import vault as vaults
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import PAGE, OwnerProvisions, Vault, references
from batchmill.services.webhooks.endpoints import WebhookService
from batchmill.store.sql.tables import connectors, secrets
from batchmill.types import FunctionSpec, ModelSpec
from batchmill.types.connectors import Action, Connector

LONG = "sk-canary-0123456789abcdef"


class Room:
    """A data directory with a vault. `again` opens it as the next process does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, HeldClock()
        self.again()

    def again(self) -> Vault:
        if hasattr(self, "database"):
            self.database.close()
        self.database = open_database(self.folder / "batchmill.db")
        self.vault = Vault(self.database, SecretBox(self.folder / KEY_FILE), self.clock)
        return self.vault


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    yield room
    room.database.close()


async def test_what_is_put_is_revealed_and_listed(room: Room) -> None:
    """A secret is there after a restart; a list shows its name and, of a long one, the last characters."""
    await room.vault.put("openai", LONG)
    await room.vault.put("short", "hush-hush")
    vault = room.again()
    assert await vault.reveal("openai") == LONG
    assert await vault.reveal_all(["short", "openai", "short"]) == {"short": "hush-hush", "openai": LONG}
    assert [(each.name, each.hint) for each in await vault.list()] == [("openai", "cdef"), ("short", "")]
    assert LONG not in repr(await vault.list())


async def test_nothing_on_the_disk_shows_a_secret(room: Room, tmp_path: Path) -> None:
    """Neither the database nor its log has the secret in it."""
    await room.vault.put("openai", LONG)
    stored = databases.data(tmp_path / "batchmill.db")
    assert b"openai" in stored and LONG.encode() not in stored
    for path in tmp_path.iterdir():
        assert LONG.encode() not in path.read_bytes(), path.name


async def test_a_secret_is_changed_and_removed(room: Room) -> None:
    """The newest value counts; a removed secret is missing, and the error says what sets it."""
    await room.vault.put("openai", "first-value")
    room.clock.at += 5
    await room.vault.put("openai", "second-value")
    [info] = await room.vault.list()
    assert info.changed - info.created == 5
    assert await room.vault.reveal("openai") == "second-value"
    await room.vault.remove("openai")
    with pytest.raises(ModelFailed, match="batchmill secrets set openai") as caught:
        await room.vault.reveal("openai")
    assert caught.value.code == "missing_secret"
    with pytest.raises(UnknownName, match="'openai'"):
        await room.vault.remove("openai")


async def test_whoever_listens_hears_what_has_changed(room: Room) -> None:
    """Names are told once they are durable; nothing is told where nothing has changed."""
    events: list[frozenset[str]] = []

    async def listener(names: frozenset[str]) -> None:
        events.append(names)

    room.vault.listen(listener)
    await room.vault.change({"a": "value-of-a", "b": "value-of-b"})
    await room.vault.change({"a": "value-of-a"}, remove=["b", "c"])
    await room.vault.change({}, remove=["b"])
    assert events == [{"a", "b"}, {"a", "b"}]


async def test_secrets_and_what_they_belong_to_are_one_transaction(room: Room) -> None:
    """Where what belongs with a secret cannot be written, the secret is not kept either."""

    def refuse(_: sa.Connection) -> None:
        raise Conflict("there is one already")

    with pytest.raises(Conflict):
        await room.vault.change({"connector/c1/key": LONG}, also=refuse)
    assert await room.vault.list() == []
    await room.vault.change(
        {"connector/c1/key": LONG},
        also=lambda db: db.execute(
            connectors.insert().values(
                id="c1", project="p", name="n", spec=b"{}", access=b"{}", revision=1, created=0.0, changed=0.0
            )
        ),
    )
    assert await room.vault.reveal("connector/c1/key") == LONG


@pytest.mark.parametrize("name", ["", "a b", "a/b", "connector/x", "connector/x/", "x" * 101, "é", "a\n", "../x"])
async def test_a_name_is_plain(room: Room, name: str) -> None:
    """A name that could be something else is refused."""
    with pytest.raises(InvalidInput) as caught:
        await room.vault.put(name, LONG)
    assert caught.value.code == "invalid_secret_name"


@pytest.mark.parametrize("value", ["", "two\nlines", "é", "x" * (16 * 1024 + 1), "nul\0"])
async def test_a_value_is_one_line(room: Room, value: str) -> None:
    """A value that could not be used is refused, and not repeated."""
    with pytest.raises(InvalidInput) as caught:
        await room.vault.put("name", value)
    assert caught.value.code == "invalid_secret"
    assert not value or value not in caught.value.message


async def test_the_most_secrets(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the most is refused; the others can still be changed."""
    monkeypatch.setattr(vaults, "SECRETS_MAX", 2)
    for name in ("a", "b", "b"):
        await room.vault.put(name, LONG)
    with pytest.raises(InvalidInput, match="remove some first"):
        await room.vault.put("c", LONG)
    assert len(await room.vault.list()) == 2


async def test_a_value_in_anothers_place_does_not_open(room: Room) -> None:
    """A sealed value that was put into another's record, or back into its own later, is refused."""
    await room.vault.put("a", "value-of-a")
    await room.vault.put("b", "value-of-b")
    old = await room.database.read(lambda db: db.execute(sa.select(secrets.c.sealed).order_by(secrets.c.name)).all())
    room.clock.at += 1
    await room.vault.put("b", "value-of-b-2")
    for (sealed,) in old:
        await room.database.write(
            lambda db, sealed=sealed: db.execute(secrets.update().where(secrets.c.name == "b").values(sealed=sealed))
        )
        with pytest.raises(InvalidConfig) as caught:
            await room.vault.reveal("b")
        assert caught.value.code == "secret_unreadable"


async def test_a_lost_key_file_is_not_replaced(room: Room, tmp_path: Path) -> None:
    """Without the key file secrets are neither added nor rotated: that would make a second one."""
    await room.vault.put("a", LONG)
    (tmp_path / KEY_FILE).rename(tmp_path / "kept")
    vault = room.again()
    for call in (vault.put("b", LONG), vault.rotate(), vault.reveal("a")):
        with pytest.raises(InvalidConfig, match="is missing"):
            await call
    assert not (tmp_path / KEY_FILE).exists()
    await vault.remove("a")
    await vault.put("b", LONG)
    assert await vault.reveal("b") == LONG


# -- rotation ---------------------------------------------------------------------------------------------------------


async def test_a_rotation_leaves_every_secret_and_no_old_key(room: Room, tmp_path: Path) -> None:
    """After a rotation all secrets are readable, and with the old key file none of them."""
    count = PAGE + 20
    await room.vault.change({f"s{n}": f"value-of-{n:04}" for n in range(count)})
    old = (tmp_path / KEY_FILE).read_bytes()
    done = await room.vault.rotate()
    assert (done.rewrapped, done.unreadable, done.keys_removed) == (count, [], 1)
    found = await room.again().reveal_all([f"s{n}" for n in range(count)])
    assert found == {f"s{n}": f"value-of-{n:04}" for n in range(count)}
    (tmp_path / KEY_FILE).write_bytes(old)
    with pytest.raises(InvalidConfig):
        await room.again().reveal("s0")


async def test_secrets_of_webhooks_are_rotated_too(room: Room, tmp_path: Path) -> None:
    """A webhook's secret signs on after a rotation."""
    config = Config(tmp_path, tmp_path)
    webhooks = WebhookService(room.database, room.clock, config, room.vault.box)
    made, secret = await webhooks.create(
        "default", name="x", url="https://example.com/h", event_types=["batch.completed"]
    )
    assert (await room.vault.rotate()).rewrapped == 1
    webhooks.close()
    webhooks = WebhookService(room.database, room.clock, config, SecretBox(tmp_path / KEY_FILE))
    listener = await webhooks.delivery_target(made.id)
    assert listener is not None and [each.reveal() for each in listener.keys] == [secret.reveal()]
    webhooks.close()


async def test_what_could_not_be_read_is_told_and_stops_nothing(room: Room) -> None:
    """A value that no key opens is named by a rotation, which rewraps all others."""
    await room.vault.change({"good": LONG, "bad": LONG})
    await room.database.write(
        lambda db: db.execute(secrets.update().where(secrets.c.name == "bad").values(sealed=b"\x02" + b"x" * 200))
    )
    done = await room.vault.rotate()
    assert done.rewrapped == 1 and len(done.unreadable) == 1 and "secret bad" in done.unreadable[0]
    assert await room.again().reveal("good") == LONG


async def test_secrets_are_used_and_changed_while_keys_rotate(room: Room) -> None:
    """Under load no secret is ever unreadable, and none that was put in meanwhile is lost."""
    names = [f"s{n}" for n in range(30)]
    await room.vault.change({name: f"value-of-{name}" for name in names})
    running = True

    async def use(mine: list[str]) -> dict[str, str]:
        count, reply = 0, {}
        while running or count < 5:
            count += 1
            for name in mine:
                reply[name] = f"value-{count}-of-{name}"
                await room.vault.put(name, reply[name])
                assert await room.vault.reveal(name) == reply[name]
        return reply

    using = [asyncio.create_task(use(names[n::3])) for n in range(3)]
    await asyncio.gather(*(room.vault.rotate() for _ in range(4)))
    running = False
    reply = {name: value for part in await asyncio.gather(*using) for name, value in part.items()}
    assert await room.again().reveal_all(names) == reply


@pytest.mark.parametrize("point", [f"{point}:{count}" for point in faults.SECRET_POINTS for count in (1, 2)])
async def test_killed_while_keys_rotate(room: Room, tmp_path: Path, point: str) -> None:
    """Killed between any two steps of a rotation every secret stays readable, and the next rotation ends it."""
    values = {f"s{n:04}": f"value-of-{n:04}" for n in range(PAGE + 10)}
    await room.vault.change(values)
    room.database.close()
    (tmp_path / "batchmill.toml").write_text(databases.settings(tmp_path / "batchmill.db"))
    environment = {**os.environ, "BATCHMILL_FAULT": f"{point}:{tmp_path / 'died'}"}
    command = [sys.executable, "-m", "batchmill", "--data-dir", str(tmp_path), "secrets", "rotate"]
    process = await asyncio.to_thread(
        subprocess.run, command, env=environment, cwd=tmp_path, capture_output=True, timeout=60
    )
    died = point not in ("after_new_key:2", "after_rewrap:2")  # these are passed once
    assert process.returncode == (-signal.SIGKILL if died else 0), process.stderr
    del room.database
    vault = room.again()
    assert await vault.reveal_all(values) == values
    await vault.rotate()
    assert await room.again().reveal_all(values) == values
    assert (tmp_path / KEY_FILE).read_text().count("\n") == 2
    assert not list(tmp_path.glob(f".{KEY_FILE}.*"))


# -- who is given what ------------------------------------------------------------------------------------------------


def model_of_everything() -> ModelSpec:
    connector = Connector(
        "c1", "c", "1", "http", [Action("PREDICT", "POST", "https://example.com")],
        credential={"key": "secret:connector/c1/key", "region": "env:REGION"},
    )  # fmt: skip
    function = FunctionSpec("main/1", "/f", "0", secrets={"TOKEN": "secret:token", "OTHER": "file:x"})
    routes = [
        ModelSpec("m", "http", "remote", api_key="secret:openai", engine_args={"header.X": "secret:header", "n": 1}),
        ModelSpec("m", "connector", "c1", connector=connector),
        ModelSpec("m", "function_process", "app.py:f", function=function, api_key="env:KEY"),
    ]
    return ModelSpec("m", "routes", "", routes=routes)


@pytest.mark.once
def test_every_secret_that_a_model_names() -> None:
    """References are found wherever a spec may hold one; of the routes beside a chosen one, none."""
    model = model_of_everything()
    found = ["secret:openai", "secret:header", "secret:connector/c1/key", "env:REGION", "env:KEY", "secret:token"]
    assert references(model) == found
    chosen = model.routes[0]
    chosen = ModelSpec("m", "http", "remote", api_key=chosen.api_key, routes=model.routes[1:])
    assert references(chosen) == ["secret:openai"]


async def test_a_worker_is_given_its_own_secrets_only(room: Room) -> None:
    """A provision holds what the model names, and the private hosts; a missing secret is named."""
    provisions = OwnerProvisions(room.vault, ["10.0.0.0/8"])
    await room.vault.change({"openai": LONG, "another": "not-for-this-model"})
    model = model_of_everything().routes[0]
    with pytest.raises(ModelFailed, match="batchmill secrets set header"):
        await provisions.of(model)
    await room.vault.put("header", "value-of-header")
    given = await provisions.of(model)
    assert given.secrets == {"secret:openai": LONG, "secret:header": "value-of-header"}
    assert given.private_hosts == ["10.0.0.0/8"]
    assert (await provisions.of(ModelSpec("f", "function", "app.py:f"))).secrets == {}


async def test_a_servers_worker_is_given_its_own_variables_only(room: Room) -> None:
    """Of the variables that a server finds, a worker is given those that its model names, or means where it names no
    key; one that is missing is left for the worker to tell of."""
    environ = {"OWN": "x", "OPENAI_API_KEY": "y", "AZURE_OPENAI_API_KEY": "z", "OTHERS": "w"}
    provisions = OwnerProvisions(room.vault, [], environ)
    cases = [
        (ModelSpec("m", "http", "r", base_url="https://api.openai.com/v1"), {"env:OPENAI_API_KEY": "y"}),
        (ModelSpec("m", "http", "r", base_url="https://example.com/v1"), {}),
        (ModelSpec("m", "http", "r", base_url="https://example.com", api_key="env:OWN"), {"env:OWN": "x"}),
        (
            ModelSpec("m", "http", "r", base_url="https://example.com", engine_args={"header.A": "env:OWN"}),
            {"env:OWN": "x"},
        ),
        (ModelSpec("m", "llm", "r", secrets={"HF_TOKEN": "env:OWN", "B": "env:MISSING"}), {"env:OWN": "x"}),
        (ModelSpec("m", "provider_batch", "r", provider="openai"), {"env:OPENAI_API_KEY": "y"}),
        (ModelSpec("m", "provider_batch", "r", provider="azure", base_url="https://a.example"), {}),
        (ModelSpec("m", "function", "app.py:f"), {}),
    ]
    for model, given in cases:
        assert (await provisions.of(model)).secrets == given, model


async def test_an_unreadable_secret_fails_its_model(room: Room, tmp_path: Path) -> None:
    """A worker whose secret the key file does not open is not started, for that reason."""
    await room.vault.put("openai", LONG)
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(ModelFailed, match="is missing"):
        await OwnerProvisions(room.again(), []).of(ModelSpec("m", "http", "remote", api_key="secret:openai"))
