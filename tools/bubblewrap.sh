#!/bin/sh
# Makes sure that bubblewrap is there, with Debian's own package where this user may install it.
set -eu
if ! command -v bwrap > /dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        echo "    there is no bwrap: install the package bubblewrap" >&2
        exit 1
    fi
    echo "--> installing the package bubblewrap"
    apt-get install -y -qq bubblewrap > /dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq bubblewrap; } > /dev/null
fi
bwrap --version > /dev/null
