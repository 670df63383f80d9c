#!/bin/sh
# Make a virtual environment with the first Python from 3.11 on that is here: tools/make_venv.sh FOLDER
# PYTHON=/path/to/python chooses one. Does nothing when the environment is there and whole.
set -eu

folder=$1
is_usable='import sys; sys.exit(not (sys.version_info >= (3, 11) and sys.implementation.name == "cpython"))'

if [ -x "$folder/bin/python" ] && "$folder/bin/python" -c "$is_usable" 2>/dev/null &&
    "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

chosen=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    # Run it: a version manager's shim may stand on PATH for a Python that is not installed.
    if "$candidate" -c "$is_usable" 2>/dev/null; then
        chosen=$candidate
        break
    fi
done
if [ -z "$chosen" ]; then
    echo "make_venv: batchmill needs Python 3.11 or later and found none among: ${PYTHON:-python3, python3.11 to 3.14}" >&2
    echo "make_venv: install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
    exit 1
fi

echo "--> making $folder with $("$chosen" --version) ($(command -v "$chosen"))"
rm -rf "$folder"
if "$chosen" -c 'import venv, ensurepip' 2>/dev/null; then
    "$chosen" -m venv "$folder"
elif "$chosen" -c 'import venv, pip' 2>/dev/null; then
    # Debian ships pip and venv without ensurepip: let the pip that is here put one into the environment.
    "$chosen" -m venv --without-pip "$folder"
    "$chosen" -m pip --disable-pip-version-check --python "$folder/bin/python" install --quiet pip
else
    echo "make_venv: $chosen lacks the modules venv and pip; on Debian or Ubuntu: apt install python3-venv python3-pip" >&2
    exit 1
fi
