#!/bin/sh
# Make an environment for each published client that the tests use, in the folder given: their pins contradict each other.
# One more, "functions", is what a deployed function may have in its own. What is there and whole is left as it is. PYTHON chooses the interpreter;
# a client whose pins it cannot meet gets another that is here, and the script says so.
set -eu
folder="$1"
tools=$(dirname "$0")
# What takes an hour to compile where a Python has no wheel of it: another Python is taken then.
wheels=numpy,pandas,scipy,pyarrow,grpcio

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
functions numpy pandas pydantic pyarrow polars
LIST
}

# Make the environment $1 with the interpreter $2 (empty: the first that is here) and install the packages $3 in it.
make_client() {
    PYTHON="$2" "$tools/make_venv.sh" "$1" </dev/null || return 1
    # shellcheck disable=SC2086
    "$1/bin/python" -m pip install -qq --disable-pip-version-check --only-binary "$wheels" $3 </dev/null
}

# Another interpreter than those of the versions $1, which could not be used.
another_python() {
    for candidate in python3.12 python3.11 python3.13 python3.14; do
        version=$("$candidate" --version 2>/dev/null) || continue
        case "$1" in *"<$version>"*) continue ;; esac
        echo "$candidate"
        return
    done
}

clients | {
    missing=
    while read -r name packages; do
        home="$folder/$name"
        if [ "$(cat "$home/.packages" 2>/dev/null)" = "$packages" ]; then continue; fi
        echo "--> installing the client $name into $home"
        python="${PYTHON:-}" tried= is_made=
        until [ "$is_made" ]; do
            if make_client "$home" "$python" "$packages"; then
                is_made=yes
                printf '%s\n' "$packages" >"$home/.packages"
                continue
            fi
            version=$("$home/bin/python" --version 2>/dev/null || "${python:-python3}" --version 2>/dev/null) || version=
            tried="$tried<$version>"
            rm -rf "$home"
            python=$(another_python "$tried")
            if [ -z "$python" ]; then
                missing="$missing $name"
                break
            fi
            echo "--> the client $name cannot be installed with ${version:-${PYTHON:-}}: trying $python"
        done
    done
    if [ "$missing" ]; then
        echo "client_envs: no Python that is here can install:$missing" >&2
        exit 1
    fi
}
