#!/bin/sh
# Make the secrets of compose.yaml, each of them once: sudo deploy/compose/make-secrets.sh
# Files that are there stay as they are. The group 10001 is that of the server's container.
set -eu
umask 077

folder=${1:-$(dirname "$0")/secrets}
group=${BATCHMILL_GROUP:-10001}
mkdir -p "$folder"
chmod 0755 "$folder"

# Standard input becomes the file NAME, unless it is there.
keep() {
    if [ ! -s "$folder/$1" ]; then
        cat >"$folder/$1.new"
        mv "$folder/$1.new" "$folder/$1"
    else
        cat >/dev/null
    fi
}

# Characters that need no quotes in a URL, an environment file or a configuration.
random() {
    openssl rand -hex 24
}

random | keep database_password
random | keep grafana_password
printf 'batchmill keys 1\n%s\n' "$(openssl rand -hex 32)" | keep secrets.key
printf 'AWS_ACCESS_KEY_ID=%s\nAWS_SECRET_ACCESS_KEY=%s\n' "$(openssl rand -hex 10)" "$(random)" | keep store.env
[ -e "$folder/metrics.key" ] || : >"$folder/metrics.key" # docs/deploy.md fills it: only the server creates keys

for name in database_password grafana_password secrets.key metrics.key; do
    chown "0:$group" "$folder/$name"
    chmod 0440 "$folder/$name"
done
# docker compose reads this one itself, as the user who calls it.
chown "${SUDO_UID:-0}:${SUDO_GID:-0}" "$folder/store.env"
chmod 0400 "$folder/store.env"
echo "the secrets are in $folder: back up secrets.key apart from the database"
