#!/usr/bin/env bash
# Makes a sandbox of profile.compose-e2e on a host: brings a project of one service up there, has a command
# of the sandbox talk to that service, destroys it, and sees that nothing of the project is left.
#
#   SANDBOXER_HOST=HOST scripts/smoke-compose-e2e.sh IMAGE
#
# HOST is as the user's `ssh` is configured or SANDBOXER_SSH_CONFIG says; it has compose and an engine with
# the image IMAGE, which has a shell. SANDBOXER_COMPOSE is the compose command there (`docker compose`),
# SANDBOXER_COMPOSE_ENV what is added to its environment (`DOCKER_HOST=…`). SANDBOXER names the command line
# to use; without it, it is built.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
image=${1:?an image with a shell is needed}
: "${SANDBOXER_HOST:?a host is needed}"
export SANDBOXER_HOST

if [ -z "${SANDBOXER:-}" ]; then
    "$here/scripts/setup"
    (cd "$here" && cargo build --release --quiet --package sandbox-examples --bin sandboxer)
    SANDBOXER="${CARGO_TARGET_DIR:-$here/target}/release/sandboxer"
fi
place=$(mktemp -d "${TMPDIR:-/tmp}/sandbox-test-smoke.XXXXXX")
[ -n "${SANDBOXER_STATE_DIR:-}" ] || export SANDBOXER_STATE_DIR=$place/state

# One field of a document; sed is everywhere, jq is not.
field() { sed -n "s/.*\"$1\":\"\\([^\"]*\\)\".*/\\1/p"; }

id=
clean_up() {
    [ -z "$id" ] || "$SANDBOXER" --quiet destroy "$id" >/dev/null || echo "smoke: $id is left" >&2
    rm -rf "$place"
}
trap clean_up EXIT

mkdir -p "$place/project/shared"
cat >"$place/project/docker-compose.yml" <<END
version: "2.4"
services:
  echo:
    image: $image
    network_mode: none
    stop_signal: SIGKILL
    volumes: ["./shared:/shared"]
    command: ["sh", "-c", "while :; do [ -e /shared/question ] && mv /shared/question /shared/answer; sleep 0.1; done"]
END

echo "== create"
status=$("$SANDBOXER" create --profile profile.compose-e2e --input "repo=$place/project" \
    --actor atm --project glas-harness --run-id smoke | cat)
echo "$status"
id=$(field sandbox_id <<<"$status")
[ "$(field state <<<"$status")" = ready ]
[ "$(field extension_id <<<"$status")" = ext.compose-ssh ]

echo "== reachability"
reachability=$("$SANDBOXER" reachability show "$id" | cat)
echo "$reachability"
[ "$(field tunnel <<<"$reachability")" = ops-bridge ]

echo "== a command beside the service"
# shellcheck disable=SC2016 # it is the sandbox's shell that expands it
answer=$("$SANDBOXER" --quiet exec --timeout 60s "$id" -- sh -c '
    echo "asked by $COMPOSE_PROJECT_NAME" >shared/question
    until [ -e shared/answer ]; do sleep 0.1; done
    cat shared/answer')
echo "$answer"
case $answer in
"asked by sandboxer-"*) ;;
*) echo "smoke: the service does not answer" >&2; exit 1 ;;
esac
directory=$("$SANDBOXER" --quiet exec "$id" -- pwd)

echo "== destroy"
"$SANDBOXER" --quiet destroy "$id" | cat
id=
ssh=(ssh)
[ -z "${SANDBOXER_SSH_CONFIG:-}" ] || ssh+=(-F "$SANDBOXER_SSH_CONFIG")
left=$("${ssh[@]}" "$SANDBOXER_HOST" "${SANDBOXER_COMPOSE_ENV:+env $SANDBOXER_COMPOSE_ENV} docker ps --all --quiet \
    --filter label=com.docker.compose.project=${answer#asked by }; ls -d '$directory' 2>/dev/null || true")
[ -z "$left" ] || { echo "smoke: something is left on $SANDBOXER_HOST: $left" >&2; exit 1; }
echo "smoke-compose-e2e: passed"
