"""The environments of published clients, whatever Python the tests run with."""

import os
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "tools/client_envs.sh"
MAKE_VENV = """#!/bin/sh
mkdir -p "$1/bin"
cp "$(command -v "${PYTHON:-python3.13}")" "$1/bin/python"
"""
# An interpreter of this version whose pip cannot install what its name stands before.
PYTHON = """#!/bin/sh
[ "$1" = --version ] && { echo "Python %s"; exit 0; }
case "$*" in *%s*) exit 1 ;; esac
"""


def install(folder: Path, pythons: dict[str, tuple[str, str]]) -> tuple[subprocess.CompletedProcess, dict[str, str]]:
    """Run the script with these interpreters alone; the version that each client has an environment of."""
    bin_, tools, home = folder / "bin", folder / "tools", folder / "envs"
    for path in (bin_, tools):
        path.mkdir()
    shutil.copy(SCRIPT, tools)
    texts = {tools / "make_venv.sh": MAKE_VENV}
    texts |= {bin_ / name: PYTHON % received for name, received in pythons.items()}
    for path, text in texts.items():
        path.write_text(text)
        path.chmod(0o755)
    for name in ("sh", "cat", "cp", "mkdir", "rm", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (bin_ / name).symlink_to(found)
    env = {**os.environ, "PATH": str(bin_), "PYTHON": "python3.13"}
    done = subprocess.run([tools / "client_envs.sh", home], env=env, capture_output=True, text=True, timeout=60)
    made = [path.parent for path in home.glob("*/.packages")]
    return done, {path.name: (path / "bin/python").read_text().split("echo ")[1].split(chr(34))[1] for path in made}


def test_a_client_gets_a_python_that_its_pins_allow(tmp_path):
    """Where the chosen Python cannot install a client another one does, which is told; the rest keep the chosen one."""
    done, made = install(tmp_path, {"python3.13": ("3.13.0", "modelbit=="), "python3.12": ("3.12.1", "nothing")})
    assert done.returncode == 0
    assert made.pop("modelbit") == "Python 3.12.1" and set(made.values()) == {"Python 3.13.0"}
    assert "the client modelbit cannot be installed with Python 3.13.0: trying python3.12" in done.stdout


def test_a_client_that_no_python_can_install_is_named(tmp_path):
    """The others are installed all the same, and the script fails in the end."""
    done, made = install(tmp_path, {"python3.13": ("3.13.0", "kserve"), "python3.11": ("3.11.7", "kserve")})
    assert done.returncode == 1
    assert "no Python that is here can install: kserve" in done.stderr
    assert "kserve" not in made and "predibase" in made and not (tmp_path / "envs/kserve").exists()
