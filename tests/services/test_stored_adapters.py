"""Adapters in an object store: their files come back, and go with the adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

from fakes.lora_files import write_lora
from services.adapter_room import US, AdapterRoom

from batchmill.services.adapters.service import REMOVED_S, AdapterService
from batchmill.store.object_files import ObjectFiles
from batchmill.store.objects import StoreObjects


async def test_an_adapter_whose_folder_is_lost(tmp_path: Path) -> None:
    """Its files come back, and the objects go after it was removed."""
    room = AdapterRoom(tmp_path)
    await room.again()
    assert room.database is not None
    objects = StoreObjects(f"file://{tmp_path}/store")
    stored = ObjectFiles(room.database, room.config.data_dir, objects, 2**30)
    await stored.open()
    adapters = AdapterService(
        room.database, room.clock, room.directory, config=room.config, vault=room.vault, stored=stored
    )
    await adapters.load()
    source = write_lora(tmp_path / "lora")
    record = await adapters.wait(await adapters.register(US, "tiny", "style", str(source), is_trusted=True))
    assert record.state == "ready", record.message
    files = {path.name: path.read_bytes() for path in Path(record.folder).iterdir()}
    shutil.rmtree(room.home)
    await stored.fetch(Path(record.folder))
    assert {path.name: path.read_bytes() for path in Path(record.folder).iterdir()} == files
    await adapters.remove(US.project, "style")
    await room.clock.sleep(REMOVED_S + 1)
    await adapters.sweep()
    assert list(objects.list("")) == []
    await adapters.close()
    await stored.close()
    await room.close()
