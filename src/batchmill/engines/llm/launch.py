"""Plans how vLLM is started for a model: Python, command line, environment. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchmill.engines.llm.calls import POLICY_FLAG
from batchmill.errors import ModelFailed
from batchmill.models import secrets
from batchmill.types import ModelSpec

CONFIG_BYTES_MAX = 16 * 1024 * 1024
CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)


def find_files(source: str, env: Mapping[str, str]) -> list[Path]:
    """The directories of a model or adapter: its own, or its snapshots in the Hugging Face cache."""
    if Path(source).is_dir():
        return [Path(source)]
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")
    hub = Path(env.get("HF_HUB_CACHE") or home / "hub")
    return sorted((hub / f"models--{source.replace('/', '--')}" / "snapshots").glob("*/"))


def refuse_remote_code(source: str, directories: list[Path], *, trusted: bool) -> None:
    """Raise ModelFailed for a model with Python code, unless the caller trusts it.

    vLLM before 0.14 ran such code without `trust-remote-code` (CVE-2026-22807).
    """
    if not directories and source.startswith(("/", ".", "~")):
        raise ModelFailed(f"there is no model directory {source!r}")
    for path in [directory / name for directory in directories for name in CONFIGS]:
        if not trusted and "auto_map" in _read_object(path):
            raise ModelFailed(
                f"the model {source!r} contains Python code ({path.name} has auto_map), which would run with your "
                "permissions; if you trust it, pass the engine argument trust-remote-code=true"
            )


def adapter_rank(name: str, path: str, env: Mapping[str, str]) -> int | None:
    """The rank of LoRA weights; None for an id that has not been downloaded yet.

    Raises: ModelFailed for a directory without an adapter.
    """
    directories = find_files(path, env)
    if not directories and (os.path.isabs(path) or path.startswith((".", "~"))):
        raise ModelFailed(f"the adapter {name!r}: there is no directory {path!r}")
    for directory in directories:
        config = _read_object(directory / "adapter_config.json")
        rank = config.get("r")
        if isinstance(rank, int) and rank > 0:
            patterns = config.get("rank_pattern")
            others = patterns.values() if isinstance(patterns, dict) else ()
            return max(rank, *(other for other in others if isinstance(other, int)), 1)
        raise ModelFailed(f"the adapter {name!r}: {directory} has no adapter_config.json with its rank `r`")
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file does not exist. Raises: ModelFailed for an invalid file."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(CONFIG_BYTES_MAX), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelFailed(f"{path} cannot be read: {error}") from None


Flag = str | int | float | bool | None

PYTHON_VARIABLE = "BATCHMILL_VLLM_PYTHON"
REPLICA_VARIABLE = "BATCHMILL_REPLICA"  # 0, 1, ... set for each worker of a model with several
CORES_VARIABLE = "BATCHMILL_CORES"  # how many cores this engine may take; unset: all of the machine
CORES_DIGITS_MAX = 9
GPUS_VARIABLE = "BATCHMILL_GPUS"  # the GPUs assigned to this engine; unset if nobody assigns them
PLUGIN_PATH = Path(__file__).parent / "vllm_plugin"  # our code that runs inside vLLM
SCHEDULER = "batchmill_yield.create"
PLUGIN = "batchmill_adapters"  # in PLUGIN_PATH; vLLM finds it by its entry point
STARTER = "batchmill_start"  # in PLUGIN_PATH: it runs vLLM's server
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the maximum ranks that vLLM accepts
LORA_RANK_DEFAULT = 16
LORAS_ACTIVE_GPU = 4  # in one batch; rows are grouped by adapter
LORAS_KEPT_GPU = 64  # in the machine's memory
LORAS_KEPT_CPU = 8
CPU_KV_GIB_MAX = 4
CPU_SEQS = 256  # rows in one batch on a CPU; vLLM's default of 128 leaves a small model idle
SMALL_CPU_CORES = 8  # on this many cores or fewer, the worker runs inside the engine's process
PARALLEL_FLAGS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
THREAD_VARIABLES = frozenset({"VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"})
PROBE_TIMEOUT_S = 60
_PROBE = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"

# Flags that batchmill sets itself -> what to do instead.
_OWNED = {
    "model": "name the model in --model vllm:SOURCE",
    "served-model-name": "the model's name and source are both served",
    "lora-modules": "use --adapter NAME=PATH",
    "uds": "the server listens on a private socket",
    "host": "the server listens on a private socket",
    "port": "the server listens on a private socket",
    "api-key": "the server listens on a private socket that needs no key",
    "ssl-keyfile": "the server listens on a private socket",
    "ssl-certfile": "the server listens on a private socket",
    "root-path": "the server listens on a private socket",
    "config": "pass each flag as an engine argument",
    "headless": "batchmill talks to the server's HTTP port",
}
# Not for the server: it would require a key from us, and the others belong to another interpreter.
_DROPPED_VARIABLES = ("VLLM_API_KEY", "PYTHONHOME", "__PYVENV_LAUNCHER__")
_OWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PATH",
    "PYTHONPATH",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_RPC_BASE_PATH",
)


class Launch(Struct, frozen=True):
    """Command, environment and files of one server."""

    command: list[str]
    env: dict[str, str]


class Hardware(Struct, frozen=True):
    """The hardware that decides between settings for CPU and GPU."""

    gpus: list[str]  # ids, as in CUDA_VISIBLE_DEVICES
    memory_free_bytes: int
    cores: int  # that the engine may take
    is_shared: bool = False  # others take the rest of the machine

    @classmethod
    def detect(cls, env: Mapping[str, str]) -> Hardware:
        """Raises: ModelFailed where the environment gives no number of cores."""
        numbers = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal())
        visible = env.get("CUDA_VISIBLE_DEVICES")
        names = [str(number) for number in numbers]
        if assigned := env.get(GPUS_VARIABLE):
            names = [name.strip() for name in assigned.split(",") if name.strip()]
        elif visible is not None:
            names = [name.strip() for name in visible.split(",") if name.strip()] if numbers else []
        elif not numbers and Path("/dev/kfd").exists():
            names = ["rocm"]
        free = (
            os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
        )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        given = env.get(CORES_VARIABLE)
        return cls(names, free, cores if given is None else min(_cores(given), cores), is_shared=given is not None)


def _cores(text: str) -> int:
    if not text.isdecimal() or len(text) > CORES_DIGITS_MAX or int(text) == 0:
        raise ModelFailed(f"{CORES_VARIABLE} is {text[:40]!r}: unset it, or set it to a number of cores from 1")
    return int(text)


def plan_launch(model: ModelSpec, python: str, socket: Path, *, env: Mapping[str, str], machine: Hardware) -> Launch:
    """The command and environment for a server on `socket`.

    Raises: ModelFailed for flags that callers may not set, and for a model that cannot start with these settings.
    """
    flags = read_flags(model.engine_args)
    source = str(Path(model.source).absolute()) if Path(model.source).is_dir() else model.source
    refuse_remote_code(
        model.source, find_files(source, env), trusted=flags.get("trust-remote-code", False) in (True, None)
    )
    ours: dict[str, Flag] = {"enable-prompt-tokens-details": True, "disable-uvicorn-access-log": True}
    ours[POLICY_FLAG] = "priority"  # live requests go ahead of rows
    ours["scheduler-cls"] = SCHEDULER
    if not machine.gpus:
        ours["max-num-seqs"] = CPU_SEQS
        if not {"compilation-config", "O", "optimization-level"} & flags.keys():
            ours["enforce-eager"] = True  # compiling takes a CPU over a minute
        if _runs_in_one_process(flags, env, machine):
            ours["distributed-executor-backend"] = "uni"
    ours |= _lora_flags(model, flags, env, machine)
    command = [python, "-m", STARTER, f"--model={source}", "--served-model-name", *_served_names(model)]
    command += [f"--uds={socket}", *_render_flags({**ours, **flags})]
    return Launch(command, _environment(flags, socket, env, machine))


def secret_variables(model: ModelSpec) -> dict[str, str]:
    """The environment variables with secrets. Raises: ModelFailed for a missing or forbidden secret."""
    for name in model.secrets:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ModelFailed(f"{name!r} is not a valid name of an environment variable", code="invalid_config")
        if name in _OWN_VARIABLES or name in _DROPPED_VARIABLES or name.startswith("BATCHMILL_"):
            raise ModelFailed(f"the variable {name!r} cannot be set for an engine", code="invalid_config")
    return {name: secrets.resolve(reference).reveal() for name, reference in model.secrets.items()}


def _runs_in_one_process(flags: Mapping[str, Flag], env: Mapping[str, str], machine: Hardware) -> bool:
    """Whether the worker runs inside the engine's process, with a thread on every core.

    In a separate process the worker computes on all cores but one, and on that one the engine spins until the worker is
    done: on two cores it ran 103 rows/s instead of 135. On a CPU vLLM accepts one process only without its
    multiprocessing. That changes nothing else for a server, and lets us set the number of threads. A caller's setting
    has precedence.
    """
    chosen = {"distributed-executor-backend", *PARALLEL_FLAGS}
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING", *THREAD_VARIABLES}
    return machine.cores <= SMALL_CPU_CORES and not (chosen & flags.keys() or variables & env.keys())


def read_flags(engine_args: Mapping[str, Flag]) -> dict[str, Flag]:
    """Engine arguments by vLLM's own names. Raises: ModelFailed for one that batchmill sets itself."""
    flags = {}
    for name, value in engine_args.items():
        flag = name.lstrip("-").replace("_", "-")
        if flag in _OWNED:
            raise ModelFailed(f"the engine argument {name!r} cannot be set: {_OWNED[flag]}")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", flag):
            raise ModelFailed(f"the engine argument {name!r} is not a flag; write it as vLLM does, like max-model-len")
        words = {"true": True, "false": False}
        flags[flag] = words.get(value.lower(), value) if isinstance(value, str) else value
    return flags


def _render_flags(flags: Mapping[str, Flag]) -> list[str]:
    """Render flags: `--flag` (true, or no value), `--no-flag` (false) or `--flag=value`; `-O3` for one letter."""
    rendered = []
    for name, value in flags.items():
        if value is True or value is None:
            rendered.append(f"--{name}")
        elif value is False:
            rendered.append(f"--no-{name}")
        else:
            rendered.append(f"--{name}={value}" if len(name) > 1 else f"-{name}{value}")
    return rendered


def _served_names(model: ModelSpec) -> list[str]:
    return list(dict.fromkeys(filter(None, (model.name, model.source, model.alias))))


def adapter_slots(model: ModelSpec, machine: Hardware) -> int:
    """The number of adapter slots of this model's engine; 0 if it takes no adapters.

    Raises: ModelFailed for an invalid number.
    """
    if not (model.adapters or model.adapter_rank):
        return 0
    flags, configured = read_flags(model.engine_args), model.limits.adapters_max
    if configured is not None and configured < 1:
        raise ModelFailed(f"limits.adapters_max is {configured}; it must be 1 or more", code="invalid_config")
    slots = (LORAS_KEPT_GPU if machine.gpus else LORAS_KEPT_CPU) if configured is None else configured
    if flags.get("max-cpu-loras") is not None:
        kept = _count(flags, "max-cpu-loras")
        slots = kept if configured is None else min(kept, configured)
    return slots if model.adapter_rank else min(slots, len(model.adapters))


def _lora_flags(
    model: ModelSpec, flags: Mapping[str, Flag], env: Mapping[str, str], machine: Hardware
) -> dict[str, Flag]:
    kept = adapter_slots(model, machine)
    if not kept:
        return {}
    for name in model.adapters:
        if name in _served_names(model):
            raise ModelFailed(f"the adapter {name!r} has the base model's name; give it another name")
    active = min(kept, LORAS_ACTIVE_GPU) if machine.gpus else kept
    if flags.get("max-loras") is not None:
        kept = max(kept, _count(flags, "max-loras"))
    return {"enable-lora": True, "max-loras": active, "max-cpu-loras": kept, "max-lora-rank": _rank_max(model, env)}


def _rank_max(model: ModelSpec, env: Mapping[str, str]) -> int:
    """The maximum adapter rank: the model's setting, or the largest of its adapters. Raises: ModelFailed."""
    rank = model.adapter_rank
    if not rank:
        good = {name: path for name, path in model.adapters.items() if name not in model.bad_adapters}
        ranks = [adapter_rank(name, path, env) for name, path in good.items()]
        rank = max([LORA_RANK_DEFAULT, *(rank for rank in ranks if rank is not None)])
    rank_max = next((allowed for allowed in LORA_RANKS if allowed >= rank), None)
    if rank_max is None:
        raise ModelFailed(f"an adapter has rank {rank}; vLLM serves at most {LORA_RANKS[-1]}")
    return rank_max


def _count(flags: Mapping[str, Flag], name: str) -> int:
    """The value of a counting flag; 1 if it is not set. Raises: ModelFailed if it is not a number."""
    value = flags.get(name)
    if value is None:
        return 1
    if not str(value).isdecimal() or int(value) < 1:
        raise ModelFailed(f"the engine argument {name!r} is {value!r}; it must be an integer of 1 or more")
    return int(value)


def absolute_adapter_path(path: str) -> str:
    """The absolute path of an adapter: the server may have another working directory. A hub id is unchanged."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def _environment(flags: Mapping[str, Flag], socket: Path, env: Mapping[str, str], machine: Hardware) -> dict[str, str]:
    chosen = {name: value for name, value in env.items() if name not in _DROPPED_VARIABLES}
    # vLLM's own sockets are created beside ours, in a directory that is deleted with the engine. In /tmp they would
    # stay after a SIGKILL.
    chosen |= {"VLLM_RPC_BASE_PATH": str(socket.parent), "PYTHONUNBUFFERED": "1"}
    chosen |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if "VLLM_PLUGINS" in env:  # the caller's plugins, and ours
        chosen["VLLM_PLUGINS"] = ",".join(filter(None, [env["VLLM_PLUGINS"], PLUGIN]))
    chosen["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # on a private socket
    chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN_PATH), env.get("PYTHONPATH")]))
    if not machine.gpus:
        gib = machine.memory_free_bytes // (4 * 1024**3)
        chosen.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, min(CPU_KV_GIB_MAX, gib))))
        if _runs_in_one_process(flags, env, machine):
            chosen |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(machine.cores)}
        elif machine.is_shared and not THREAD_VARIABLES & env.keys():
            # vLLM would bind its threads to all cores of the machine. Each rank gets the same part of those given.
            chosen |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            chosen |= {"OMP_NUM_THREADS": str(max(1, machine.cores // _ranks(flags)))}
    elif env.get(GPUS_VARIABLE):
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(_assigned_gpus(flags, machine.gpus))
    elif REPLICA_VARIABLE in env:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(_replica_gpus(flags, env[REPLICA_VARIABLE], machine.gpus))
    return chosen


def _ranks(flags: Mapping[str, Flag]) -> int:
    """The processes that compute, each on a GPU of its own where there are GPUs."""
    ranks = 1
    for name in PARALLEL_FLAGS:
        ranks *= _count(flags, name)
    return ranks


def _assigned_gpus(flags: Mapping[str, Flag], gpus: list[str]) -> list[str]:
    """The GPUs assigned to this engine, if they are enough."""
    needed = _ranks(flags)
    if len(gpus) < needed:
        raise ModelFailed(
            f"the engine has the GPUs {', '.join(gpus)} and needs {needed} for its parallel sizes; "
            f"set gpus = {needed} for the model",
            code="invalid_config",
        )
    return gpus


def _replica_gpus(flags: Mapping[str, Flag], replica: str, gpus: list[str]) -> list[str]:
    """The GPUs of this replica."""
    each = _ranks(flags)
    first = int(replica) * each
    replica_gpus = gpus[first : first + each]
    if len(replica_gpus) < each:
        raise ModelFailed(
            f"replica {replica} needs {each} GPUs for itself and {len(gpus)} are visible; "
            f"at most {len(gpus) // each} replicas fit"
        )
    return replica_gpus


# The Python that has vLLM


def find_python(model: ModelSpec, env: Mapping[str, str], here: Path) -> str:
    """The interpreter of the environment with vLLM. Blocks while it runs one.

    Raises: ModelFailed if the configured interpreter has no vLLM, or if none is found.
    """
    for origin, configured in (("the model's python", model.python), (PYTHON_VARIABLE, env.get(PYTHON_VARIABLE))):
        if configured:
            python = shutil.which(os.path.expanduser(configured), path=env.get("PATH"))
            if python is None:
                raise ModelFailed(f"{origin} is {configured!r}, which is not a program")
            if not _has_vllm(python, env):
                raise ModelFailed(f"{origin} is {configured!r}, and vLLM is not installed there")
            return python
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    for python in (str(here / ".venv-vllm/bin/python"), _python_of_command(env)):
        if python is not None and os.access(python, os.X_OK) and _has_vllm(python, env):
            return python
    raise ModelFailed(
        "vLLM was not found: install it in a separate environment with "
        "`python tools/install_vllm.py --venv .venv-vllm` (`make demo` does), or with `pip install vllm` beside "
        f"batchmill, or name the Python that has it in {PYTHON_VARIABLE}"
    )


def _has_vllm(python: str, env: Mapping[str, str]) -> bool:
    clean = {name: value for name, value in env.items() if name not in _DROPPED_VARIABLES}
    try:
        result = subprocess.run(
            [python, "-c", _PROBE], env=clean, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


def _python_of_command(env: Mapping[str, str]) -> str | None:
    """The interpreter of the `vllm` command on PATH: from its first line, or from its directory."""
    command = shutil.which("vllm", path=env.get("PATH"))
    if command is None:
        return None
    with open(command, "rb") as file:
        first = file.readline(4096)
    words = shlex.split(first[2:].decode("utf-8", "replace")) if first.startswith(b"#!") else []
    if words and "python" in Path(words[0]).name:
        return words[0]
    return str(Path(command).resolve().parent / "python")
