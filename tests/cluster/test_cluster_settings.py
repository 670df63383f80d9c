"""The settings of a cluster, and what is said of one. No Ray runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from batchmill import __version__, config
from batchmill.errors import InvalidConfig
from batchmill.executors.channel import joined
from batchmill.executors.ray import frames
from batchmill.executors.ray.checks import checks
from batchmill.executors.ray.frames import Connected, Placement
from batchmill.executors.ray.waiting import waits_for
from batchmill.models.worker_environment import of_placed_worker
from batchmill.types import ModelSpec
from batchmill.types.cluster import ClusterNode
from batchmill.wire.messages import Answers, FunctionReply

REFUSED = {
    '[cluster]\nexecutor = "dask"': "cluster.executor is \"ray\", not 'dask'",
    '[cluster]\nexecutor = "ray"\naddress = "ray://head:10001"': "Ray's client, which cannot stream",
    '[cluster]\nexecutor = "ray"\naddress = "head"': "\"HOST:6379\" of the head, not 'head'",
    '[cluster]\nexecutor = "ray"\naddress = "head:65536"': "\"HOST:6379\" of the head, not 'head:65536'",
    '[cluster]\nexecutr = "ray"': "did you mean cluster.executor?",
    '[models.m]\nengine = "function"\nsource = "a.py:f"\ncpus = 2': "models.m.cpus has no effect on workers of this",
    '[models.m]\nengine = "function"\nsource = "a.py:f"\nresources = { spot = 1 }': "models.m.resources has no effect",
    '[machine]\nmemory = "1GiB"\n[cluster]\nexecutor = "ray"': "[machine] has no effect on a cluster",
    '[cluster]\nexecutor = "ray"\n[models.m]\nengine = "function"\nsource = "a:f"\nresources = { GPU = 1 }': "`gpus`",
    '[cluster]\nexecutor = "ray"\n[models.m]\nengine = "function"\nsource = "a.py:f"\ncpus = 1025': "0 to 1,024",
}


def load(tmp_path: Path, text: str, executor: str | None = None) -> config.Config:
    (tmp_path / "batchmill.toml").write_text(text)
    return config.load(environ={}, cwd=tmp_path, executor=executor)


def test_settings_without_an_effect_are_refused(tmp_path):
    """What names no cluster, or would be ignored, is refused with the way out."""
    for text, message in REFUSED.items():
        with pytest.raises(InvalidConfig) as refused:
            load(tmp_path, text)
        assert message in refused.value.message, (text, refused.value.message)


def test_an_address_may_stand_without_an_executor(tmp_path):
    """`--executor ray` chooses the cluster of the file for one command."""
    assert load(tmp_path, '[cluster]\naddress = "local"').cluster.address == "local"


def test_the_flag_counts_as_the_file(tmp_path):
    """With `--executor ray` a model may name what only a cluster deals, and [machine] is refused."""
    text = '[models.m]\nengine = "function"\nsource = "a.py:f"\ncpus = 2\nresources = { spot = 1 }'
    read = load(tmp_path, text, "ray")
    assert read.cluster.executor == "ray" and read.models["m"].cpus == 2
    with pytest.raises(InvalidConfig, match="no effect on a cluster"):
        load(tmp_path, '[machine]\nmemory = "1GiB"', "ray")


def test_a_worker_says_what_it_waits_for():
    """The sentence names what no node has, what is not free, and what no single node has free."""
    nodes = [{"NodeID": name, "Alive": True, "Resources": {"CPU": 4, "GPU": 2, "memory": 8 * 2**30}} for name in "ab"]
    free = {"a": {"CPU": 4, "GPU": 1, "memory": 2**30}, "b": {"CPU": 4, "memory": 8 * 2**30}}
    assert waits_for(Placement(1, 2), nodes, free) == "needs 2 GPUs; the cluster has 1 free"
    assert waits_for(Placement(1, 4), nodes, free) == "needs 4 GPUs; no node of the cluster has more than 2 GPUs"
    free["b"]["GPU"] = 1
    assert waits_for(Placement(1, 2), nodes, free) == ("needs 2 GPUs; the cluster has 2 free, at most 1 on one node")
    assert waits_for(Placement(1, 0, 0, 4 * 2**30), nodes, free) == "its actor is being started"


def test_the_doctor_names_what_differs():
    """Every flaw is told with its node and the way out; a cluster that is whole has none."""
    here = Connected("h:1", "2.60.0", "3.11.7", __version__, False, True, True)
    good = ClusterNode("n", "10.0.0.2", ray="2.60.0", python="3.11.7", batchmill=__version__, sees_data=True)
    assert all(each.is_ok for each in checks(here, [good], Path("/data"), trusted=False))
    bad = msgspec.structs.replace(good, python="3.12.1", clock_offset_s=5.0, sees_data=False)
    silent = ClusterNode("m", "10.0.0.3", flaw="it did not reply: gone")
    found = checks(here, [bad, silent], Path("/data"), trusted=False)
    flaws = {each.name: each.message for each in found if not each.is_ok}
    assert flaws.keys() == {"nodes reply", "version of Python", "clocks", "shared folder"}
    assert "10.0.0.2 has 3.12.1 and this machine 3.11.7" in flaws["version of Python"]
    open_cluster = msgspec.structs.replace(here, has_tls=False)
    (flaw,) = [each for each in checks(open_cluster, [], Path("/"), trusted=False) if not each.is_ok]
    assert "RAY_USE_TLS" in flaw.message
    assert all(each.is_ok for each in checks(open_cluster, [good], Path("/"), trusted=True))
    blind = msgspec.structs.replace(good, sees_data=False, store_flaw="the store refuses the credentials")
    found = [each for each in checks(here, [good, blind], Path("/"), trusted=False, store="s3://b") if not each.is_ok]
    assert [each.name for each in found] == ["object store on nodes"]
    assert found[0].message.startswith("10.0.0.2: the store refuses") and "AWS_*" in found[0].message


def test_items_are_cut_where_they_end():
    """An item holds its messages; one that is cut off, or a place in memory that is not shared, is refused."""
    item = frames.join([b"one", b"", b"three"])
    assert [bytes(each) for each in frames.split(item)] == [b"one", b"", b"three"]
    with pytest.raises(ConnectionError):
        frames.split(item[:-1])
    with pytest.raises(ConnectionError):
        joined(Answers([FunctionReply(1, place=(0, 9))]))
    assert joined(Answers([FunctionReply(1, pieces=[b"a", b"b"])])).answers[0].body == b"ab"


def test_a_node_keeps_its_own_paths():
    """A worker elsewhere gets what its engine reads, not the paths, devices and Ray variables of this machine."""
    ours = {"PATH": "/ours", "HF_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "1", "RAY_AUTH_TOKEN": "r", "ACME": "a"}
    assert of_placed_worker(ModelSpec("m", "llm", "x"), ours, ["ACME"]) == {"HF_TOKEN": "t", "ACME": "a"}
