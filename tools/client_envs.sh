#!/bin/sh
# Make an environment for each published client that the tests use, in the folder given: their pins contradict each other.
# One more, "functions", is what a deployed function may have in its own. What is there and whole is left as it is. PYTHON chooses the interpreter.
set -eu
folder="$1"

# name: what is installed
clients() {
    cat <<LIST
modelbit modelbit==0.44.3 pandas setuptools<81
inferless inferless==0.2.15
tritonclient tritonclient[http,grpc]==2.73.0 ml_dtypes
kserve kserve
opensearch opensearch-py==3.2.0
opensearch_ml opensearch-py==3.2.0 opensearch-py-ml==1.3.0
predibase predibase==2025.10.3
functions numpy pandas pydantic
LIST
}

clients | while read -r name packages; do
    home="$folder/$name"
    if [ "$(cat "$home/.packages" 2>/dev/null)" = "$packages" ]; then continue; fi
    echo "--> installing the client $name into $home"
    PYTHON="${PYTHON:-}" "$(dirname "$0")/make_venv.sh" "$home"
    # shellcheck disable=SC2086
    "$home/bin/python" -m pip install -qq --disable-pip-version-check $packages
    printf '%s\n' "$packages" >"$home/.packages"
done
