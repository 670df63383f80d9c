"""How vLLM is found and started for a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from llm_support import FakeVllm
from msgspec.structs import replace

from batchmill.engines.llm.launch import (
    LORA_RANKS,
    PLUGIN_PATH,
    Hardware,
    adapter_slots,
    find_python,
    plan_launch,
    secret_variables,
)
from batchmill.errors import ModelFailed
from batchmill.types import Limits, ModelSpec

CPU = Hardware([], 64 * 1024**3, cores=64)
SMALL_CPU = Hardware([], 64 * 1024**3, cores=2)
GPUS = Hardware(["0", "1", "2", "3"], 64 * 1024**3, cores=64)
SOCKET = Path("/tmp/batchmill-x/s")


@pytest.fixture
def fake(tmp_path):
    return FakeVllm(tmp_path)


def launch(model, *, env=None, machine=CPU):
    return plan_launch(model, "python", SOCKET, env=env or {}, machine=machine)


def value(command, flag):
    """What follows `--flag=`."""
    return next(word.partition("=")[2] for word in command if word.startswith(f"--{flag}="))


def test_the_command_serves_the_model_under_both_names(fake):
    """Rows may name the model or its source, on a private socket, and replies tell cached tokens."""
    model = fake.model()
    command = launch(model).command
    assert command[:4] == ["python", "-m", "batchmill_start", f"--model={model.source}"]
    names = command.index("--served-model-name")
    assert command[names + 1 : names + 3] == ["tiny", model.source]
    assert value(command, "uds") == str(SOCKET)
    assert "--enable-prompt-tokens-details" in command


@pytest.mark.parametrize(
    ("name", "given", "word"),
    [
        ("max-model-len", 2048, "--max-model-len=2048"),
        ("max_model_len", "2048", "--max-model-len=2048"),
        ("--dtype", "bfloat16", "--dtype=bfloat16"),
        ("enforce-eager", False, "--no-enforce-eager"),
        ("enable_prefix_caching", "false", "--no-enable-prefix-caching"),
        ("enable-prefix-caching", "True", "--enable-prefix-caching"),
        ("enable-prefix-caching", None, "--enable-prefix-caching"),
        ("gpu-memory-utilization", 0.5, "--gpu-memory-utilization=0.5"),
        ("max-num-seqs", 7, "--max-num-seqs=7"),
        ("hf-overrides", '{"a": 1}', '--hf-overrides={"a": 1}'),
        ("O", 2, "-O2"),
    ],
)
def test_engine_arguments_become_flags(fake, name, given, word):
    """Every kind of value is written as vLLM's command line has it, and wins over our default."""
    command = launch(fake.model(engine_args={name: given})).command
    assert word in command
    flag = word.split("=")[0]
    assert sum(other.split("=")[0] == flag for other in command) == 1


@pytest.mark.parametrize("name", ["model", "uds", "port", "lora_modules", "--served-model-name", "api-key"])
def test_flags_that_are_ours_are_refused(fake, name):
    """A flag that would lead past batchmill is refused by name, with what to do instead."""
    with pytest.raises(ModelFailed, match="cannot be set"):
        launch(fake.model(engine_args={name: "x"}))


@pytest.mark.parametrize("name", ["", "a b", "x=y", "--"])
def test_a_name_that_is_no_flag_is_refused(fake, name):
    """What cannot be a flag's name never reaches a command line."""
    with pytest.raises(ModelFailed, match="is not a flag"):
        launch(fake.model(engine_args={name: "x"}))


def test_a_cpu_starts_eager_with_a_cache_that_fits(fake):
    """Without a GPU the engine starts eagerly and its cache has 1 to 4 GiB, unless the caller chose."""
    plan = launch(fake.model())
    assert "--enforce-eager" in plan.command
    assert plan.env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert launch(fake.model(), machine=Hardware([], 0, 2)).env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert launch(fake.model(), env={"VLLM_CPU_KVCACHE_SPACE": "9"}).env["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert "--enforce-eager" not in launch(fake.model(engine_args={"O": 3})).command


def test_a_small_cpu_runs_in_one_process(fake):
    """With few cores none is spent on waiting for another process, unless the caller chose how it runs."""
    plan = launch(fake.model(), machine=SMALL_CPU)
    assert value(plan.command, "distributed-executor-backend") == "uni"
    assert (plan.env["VLLM_ENABLE_V1_MULTIPROCESSING"], plan.env["OMP_NUM_THREADS"]) == ("0", "2")
    others = [
        launch(fake.model(), machine=CPU),
        launch(fake.model(), machine=SMALL_CPU, env={"VLLM_CPU_OMP_THREADS_BIND": "0"}),
        launch(fake.model(engine_args={"tensor-parallel-size": 2}), machine=SMALL_CPU),
        launch(fake.model(), machine=Hardware(["0"], 0, 2)),
    ]
    for other in others:
        assert not any(word.startswith("--distributed-executor-backend") for word in other.command)
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in other.env


def test_a_part_of_a_cpu_has_its_threads(fake):
    """An engine that was given some cores of a machine takes no more, in one process or in several."""
    cores = len(os.sched_getaffinity(0))
    assert (Hardware.detect({}).cores, Hardware.detect({}).is_shared) == (cores, False)
    given = Hardware.detect({"BATCHMILL_CORES": "1"})
    assert (given.cores, given.is_shared) == (1, True)
    assert Hardware.detect({"BATCHMILL_CORES": "9999"}).cores == cores
    for text in ("", "two", "0", "-1", "1.5", "9" * 5000):
        with pytest.raises(ModelFailed, match=f"BATCHMILL_CORES is '{text[:40]}': unset it"):
            Hardware.detect({"BATCHMILL_CORES": text})
    assert launch(fake.model(), machine=replace(SMALL_CPU, is_shared=True)).env["OMP_NUM_THREADS"] == "2"
    large = Hardware([], 64 * 1024**3, 32, is_shared=True)
    for flags, threads in (({}, "32"), ({"tensor-parallel-size": 2}, "16")):
        env = launch(fake.model(engine_args=flags), machine=large).env
        assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_OMP_THREADS_BIND"]) == (threads, "nobind")
    chosen = launch(fake.model(), machine=large, env={"OMP_NUM_THREADS": "4"}).env
    assert chosen["OMP_NUM_THREADS"] == "4" and "VLLM_CPU_OMP_THREADS_BIND" not in chosen


def test_a_gpu_gets_no_setting_of_a_cpu(fake):
    """With a GPU vLLM's own defaults hold."""
    plan = launch(fake.model(), machine=GPUS)
    assert "--enforce-eager" not in plan.command
    assert not any(word.startswith("--max-num-seqs") for word in plan.command)
    assert "VLLM_CPU_KVCACHE_SPACE" not in plan.env


def test_the_environment_keeps_what_is_the_users_and_drops_what_would_harm(fake):
    """Settings go through; a server key, which we would be asked for, does not."""
    env = launch(fake.model(), env={"HF_HUB_OFFLINE": "1", "VLLM_API_KEY": "k", "PYTHONHOME": "/x"}).env
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert env["VLLM_RPC_BASE_PATH"] == str(SOCKET.parent)
    assert not {"VLLM_API_KEY", "PYTHONHOME"} & env.keys()


@pytest.mark.parametrize(("rank", "room"), [(1, 16), (16, 16), (17, 32), (512, 512)])
def test_adapters_get_room_for_the_highest_rank(fake, rank, room):
    """The ranks are read from the adapters, and rounded up to one that vLLM has."""
    adapters = {"upper": fake.adapter("upper", rank=8), "reverse": fake.adapter("reverse", rank=rank)}
    command = launch(fake.model(adapters=adapters)).command
    assert "--enable-lora" in command
    assert value(command, "max-lora-rank") == str(room)
    assert int(value(command, "max-lora-rank")) in LORA_RANKS
    assert "--lora-modules" not in command


def many(fake, count=100):
    return {f"a{number}": fake.adapter(f"a{number}") for number in range(count)}


@pytest.mark.parametrize(
    ("machine", "count", "fields", "active", "kept"),
    [
        (GPUS, 100, {}, "4", "64"),
        (GPUS, 2, {}, "2", "2"),
        (CPU, 100, {}, "8", "8"),
        (CPU, 2, {}, "2", "2"),
        (CPU, 100, {"limits": Limits(adapters_max=3)}, "3", "3"),
        (GPUS, 100, {"limits": Limits(adapters_max=3)}, "3", "3"),
        (CPU, 100, {"engine_args": {"max-cpu-loras": 5}}, "5", "5"),
        (CPU, 100, {"engine_args": {"max-cpu-loras": 5}, "limits": Limits(adapters_max=3)}, "3", "5"),
        (CPU, 100, {"engine_args": {"max-loras": 2}}, "2", "8"),
        (GPUS, 100, {"engine_args": {"max-loras": 70}}, "70", "70"),
    ],
)
def test_adapters_take_bounded_room(fake, machine, count, fields, active, kept):
    """However many adapters there are, the engine holds a few at a time, as many as the caller says."""
    command = launch(fake.model(adapters=many(fake, count), **fields), machine=machine).command
    assert (value(command, "max-loras"), value(command, "max-cpu-loras")) == (active, kept)


def test_an_engine_with_room_for_a_rank_knows_no_adapters(fake):
    """A model that says the rank takes whatever adapters its jobs bring; the server is started without any."""
    plan = launch(fake.model(adapter_rank=64))
    assert (value(plan.command, "max-lora-rank"), value(plan.command, "max-loras")) == ("64", "8")
    assert plan.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in launch(fake.model()).command


def test_the_room_is_a_number_from_1_on(fake):
    """A limit of no adapters is refused, not taken for another one."""
    with pytest.raises(ModelFailed, match="adapters_max is 0"):
        adapter_slots(fake.model(adapter_rank=8, limits=Limits(adapters_max=0)), CPU)


def test_a_bad_adapter_keeps_no_engine_from_starting(fake):
    """An adapter that is known to be bad is not read: only its rows fail."""
    model = fake.model(adapters={"a": fake.adapter("a"), "bad": "/no/such"}, bad_adapters={"bad": "it is not there"})
    assert value(launch(model).command, "max-lora-rank") == "16"


def test_our_plugin_stands_beside_those_of_the_caller(fake):
    """A choice of plugins keeps ours; without a choice vLLM takes all."""
    assert launch(fake.model(), env={"VLLM_PLUGINS": "theirs"}).env["VLLM_PLUGINS"] == "theirs,batchmill_adapters"
    assert "VLLM_PLUGINS" not in launch(fake.model()).env
    (points,) = PLUGIN_PATH.glob("*.dist-info/entry_points.txt")
    assert "batchmill_adapters = batchmill_adapters:register" in points.read_text()


def test_secrets_become_variables(fake, monkeypatch):
    """What a model says of secrets reaches the server's environment; what would lead elsewhere is refused."""
    monkeypatch.setenv("THEIR_TOKEN", "hf_abcdefgh12345678")
    assert secret_variables(fake.model(secrets={"HF_TOKEN": "env:THEIR_TOKEN"})) == {"HF_TOKEN": "hf_abcdefgh12345678"}
    for name in ("PYTHONPATH", "VLLM_API_KEY", "BATCHMILL_GPUS", "a b"):
        with pytest.raises(ModelFailed, match=name):
            secret_variables(fake.model(secrets={name: "env:THEIR_TOKEN"}))
    with pytest.raises(ModelFailed, match="NOT_THERE"):
        secret_variables(fake.model(secrets={"HF_TOKEN": "env:NOT_THERE"}))


def test_a_rank_pattern_counts(fake):
    """Layers with a rank of their own need room too."""
    path = Path(fake.adapter("a"))
    (path / "adapter_config.json").write_text('{"r": 8, "rank_pattern": {"q_proj": 40}}')
    assert value(launch(fake.model(adapters={"a": str(path)})).command, "max-lora-rank") == "64"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("{}", "with its rank"),
        ("oops", "cannot be read"),
        ('{"r": 600}', "rank 600"),
        ('{"r": "8"}', "with its rank"),
    ],
)
def test_a_broken_adapter_is_told_before_anything_starts(fake, config, match):
    """A folder that is not an adapter, or one that is too large, is named in the error."""
    path = Path(fake.adapter("a"))
    (path / "adapter_config.json").write_text(config)
    with pytest.raises(ModelFailed, match=match):
        launch(fake.model(adapters={"a": str(path)}))


def test_an_adapter_or_model_that_is_not_there_is_told(fake):
    """A path that leads nowhere is an error of the path, not of vLLM."""
    with pytest.raises(ModelFailed, match="no directory '/no/such'"):
        launch(fake.model(adapters={"a": "/no/such"}))
    with pytest.raises(ModelFailed, match="no model directory '/no/such'"):
        launch(fake.model(source="/no/such"))


def test_an_adapter_with_the_models_name_is_refused(fake):
    """A name that rows use means one thing."""
    with pytest.raises(ModelFailed, match="base model's name"):
        launch(fake.model(adapters={"tiny": fake.adapter("a")}))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_with_code_of_its_own_is_refused_unless_trusted(fake, name):
    """`auto_map` means Python code from the model; it runs only when the caller says so."""
    model = fake.model()
    (Path(model.source) / name).write_text('{"auto_map": {"AutoModel": "x.Y"}}')
    with pytest.raises(ModelFailed, match="trust-remote-code"):
        launch(model)
    trusted = ModelSpec("tiny", "llm", model.source, engine_args={"trust_remote_code": True})
    assert "--trust-remote-code" in launch(trusted).command


def test_a_downloaded_model_is_looked_at_too(fake, tmp_path):
    """Code is also found in the snapshot of a model that was named by its id."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"auto_map": {}}')
    with pytest.raises(ModelFailed, match="auto_map"):
        launch(ModelSpec("m", "llm", "org/name"), env={"HF_HUB_CACHE": str(tmp_path / "hub")})


def test_gpus_that_were_dealt_are_taken(fake):
    """Where somebody deals the devices, the engine sees those and no others, and says when they are too few."""
    env = {"BATCHMILL_GPUS": "2,5", "BATCHMILL_REPLICA": "7", "CUDA_VISIBLE_DEVICES": "0"}
    machine = Hardware.detect(env)
    assert machine.gpus == ["2", "5"]
    model = fake.model(engine_args={"tensor-parallel-size": 2})
    assert launch(model, env=env, machine=machine).env["CUDA_VISIBLE_DEVICES"] == "2,5"
    with pytest.raises(ModelFailed, match="gpus = 4"):
        launch(fake.model(engine_args={"tensor-parallel-size": 4}), env=env, machine=machine)


def test_replicas_split_the_gpus(fake):
    """Each replica sees its own devices, as many as its tensors are split over, and one too many is refused."""
    model = fake.model(engine_args={"tensor-parallel-size": 2})
    seen = [launch(model, env={"BATCHMILL_REPLICA": n}, machine=GPUS).env["CUDA_VISIBLE_DEVICES"] for n in "01"]
    assert seen == ["0,1", "2,3"]
    with pytest.raises(ModelFailed, match="at most 2 replicas fit"):
        launch(model, env={"BATCHMILL_REPLICA": "2"}, machine=GPUS)
    assert "CUDA_VISIBLE_DEVICES" not in launch(model, machine=GPUS).env


# Where vLLM is


def environment(folder: Path, name: str, *, has_vllm: bool) -> str:
    """A Python that has vLLM or not."""
    site = folder / name / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").touch()
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    path = f"PYTHONPATH={site} " if has_vllm else ""
    python.write_text(f'#!/bin/sh\n{path}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_the_python_that_is_named_comes_first(tmp_path):
    """The model's own setting wins over the environment variable, which wins over what lies beside."""
    ours, other = (environment(tmp_path, name, has_vllm=True) for name in ("a", "b"))
    beside = environment(tmp_path, ".venv-vllm", has_vllm=True)
    env = {"BATCHMILL_VLLM_PYTHON": other}
    assert find_python(ModelSpec("m", "llm", "s", python=ours), env, tmp_path) == ours
    assert find_python(ModelSpec("m", "llm", "s"), env, tmp_path) == other
    assert find_python(ModelSpec("m", "llm", "s"), {}, tmp_path) == beside


def test_a_named_python_without_vllm_is_an_error_and_not_passed_over(tmp_path):
    """Who names an interpreter hears when it cannot do."""
    bare = environment(tmp_path, "bare", has_vllm=False)
    with pytest.raises(ModelFailed, match="vLLM is not installed there"):
        find_python(ModelSpec("m", "llm", "s", python=bare), {}, tmp_path)
    with pytest.raises(ModelFailed, match="is not a program"):
        find_python(ModelSpec("m", "llm", "s"), {"BATCHMILL_VLLM_PYTHON": "/no/such"}, tmp_path)


@pytest.mark.parametrize("first_line", ["#!{python}", "#!/bin/sh"])
def test_the_vllm_command_leads_to_its_python(tmp_path, first_line):
    """`vllm` on PATH is followed to the interpreter in its first line, or to the one beside it."""
    python = environment(tmp_path, "env", has_vllm=True)
    command = Path(python).parent / "vllm"
    command.write_text(first_line.format(python=python) + "\n")
    command.chmod(0o755)
    assert find_python(ModelSpec("m", "llm", "s"), {"PATH": str(command.parent)}, tmp_path) == python


def test_without_vllm_the_error_says_how_to_get_it(tmp_path):
    """Nothing found is an error that can be acted on."""
    with pytest.raises(ModelFailed, match="install_vllm.py --venv .venv-vllm"):
        find_python(ModelSpec("m", "llm", "s"), {"PATH": "/nowhere"}, tmp_path)
