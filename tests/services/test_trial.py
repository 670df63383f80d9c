"""Trials of new versions: what is refused before anybody can call it. Each test has a real process."""

import pytest

from batchmill.errors import ModelFailed
from batchmill.services.functions.deploying import try_version
from batchmill.types import FunctionSpec, ModelSpec
from batchmill.wire.bundles import DeployOrder

ONE = "def f(a): return a\n"
MANY = "import batchmill\n@batchmill.batched(8)\ndef f(a): return a\n"


async def tried(folder, text, **how):
    (folder / "code").mkdir()
    (folder / "code" / "app.py").write_text(text)
    function = FunctionSpec(version="main/1", folder=str(folder / "code"), digest="0", **how)
    spec = ModelSpec("f", "function_process", "app.py:f", function=function)
    return await try_version(spec, folder / "trial", DeployOrder("f", "app.py:f"))


@pytest.mark.parametrize("how", [{"batch_size": 8}, {"batch_window_s": 0.005}, {"batch_size": 8, "batch_window_s": 1}])
async def test_batches_of_a_function_of_single_rows_are_refused(tmp_path, how):
    """A batch size or window that would have no effect is refused, with what would give it one."""
    with pytest.raises(ModelFailed, match="takes one row at a time.*@batched"):
        await tried(tmp_path, ONE, **how)


async def test_more_rows_than_a_call_can_have_are_refused(tmp_path):
    """A batch size beyond what lists may have is refused, not made smaller in silence."""
    with pytest.raises(ModelFailed, match="70,000.*65,536"):
        await tried(tmp_path, MANY, batch_size=70_000)


async def test_the_batch_size_of_a_deployment_is_kept(tmp_path):
    """The size that the order has is the size of the version's batches."""
    interface = await tried(tmp_path, MANY, batch_size=500, batch_window_s=0.002)
    assert (interface.batch_size, interface.batch_window_s) == (500, 0.002)
