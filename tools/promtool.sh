#!/bin/sh
# Make sure that there is a promtool in FOLDER: tools/promtool.sh FOLDER. It is that of the PATH, or Debian's.
set -eu

folder=$1
if [ -x "$folder/promtool" ]; then
    exit 0
fi
mkdir -p "$folder"
if found=$(command -v promtool); then
    ln -s "$found" "$folder/promtool"
    exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "    there is no promtool: install Prometheus, or put promtool on the PATH" >&2
    exit 1
fi
echo "--> unpacking promtool of Debian's package prometheus into $folder"
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
cd "$temporary"
apt-get download -qq prometheus >/dev/null 2>&1 || {
    [ "$(id -u)" != 0 ] || apt-get update -qq
    apt-get download -qq prometheus >/dev/null
}
dpkg-deb --extract prometheus_*.deb unpacked
cd - >/dev/null
mv "$temporary/unpacked/usr/bin/promtool" "$folder/promtool"
"$folder/promtool" --version >/dev/null
