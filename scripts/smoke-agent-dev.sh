#!/usr/bin/env bash
# Makes a sandbox of profile.agent-dev, prints how it is reached, runs the hint, and destroys it.
#
#   scripts/smoke-agent-dev.sh [REPOSITORY]        this one if not given
#
# SANDBOXER names the command line to use; without it, it is built. With SANDBOXER_HOST it goes to that host,
# over SSH, as the user's `ssh` is configured or SANDBOXER_SSH_CONFIG says.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
repository=$(realpath "${1:-$here}")

if [ -z "${SANDBOXER:-}" ]; then
    "$here/scripts/setup"
    (cd "$here" && cargo build --release --quiet --package sandbox-examples --bin sandboxer)
    SANDBOXER="${CARGO_TARGET_DIR:-$here/target}/release/sandboxer"
fi
state=
if [ -z "${SANDBOXER_STATE_DIR:-}" ]; then
    state=$(mktemp -d "${TMPDIR:-/tmp}/sandbox-test-smoke.XXXXXX")
    export SANDBOXER_STATE_DIR=$state
fi

# One field of a document; sed is everywhere, jq is not.
field() { sed -n "s/.*\"$1\":\"\\([^\"]*\\)\".*/\\1/p" | sed 's/\\\\/\\/g'; }

id=
clean_up() {
    [ -z "$id" ] || "$SANDBOXER" --quiet destroy "$id" >/dev/null || echo "smoke: $id is left" >&2
    [ -z "$state" ] || rm -rf "$state"
}
trap clean_up EXIT

host=()
[ -z "${SANDBOXER_HOST:-}" ] || host=(--host "$SANDBOXER_HOST")
echo "== create"
status=$("$SANDBOXER" create --profile profile.agent-dev --input "repo=$repository" \
    --actor agt --project glas-harness "${host[@]}" | cat)
echo "$status"
id=$(field sandbox_id <<<"$status")
[ "$(field state <<<"$status")" = ready ]

echo "== reachability"
reachability=$("$SANDBOXER" reachability show "$id" | cat)
echo "$reachability"
hint=$(field local_exec_hint <<<"$reachability")
[ -n "$hint" ] || hint=$(field ssh_one_liner <<<"$reachability")

echo "== the hint, as it would be pasted"
# With another last word it runs any other command; a script has no terminal to give.
hint=${hint/ --tty/}
hint=${hint/#ssh -t /ssh }
listed=$(sh -c "${hint%/bin/sh*}/bin/ls /workspace${hint##*/bin/sh}" | LC_ALL=C sort)
echo "$listed"
[ "$listed" = "$(ls "$repository" | LC_ALL=C sort)" ] || { echo "smoke: those are not the repository's files" >&2; exit 1; }

echo "== destroy"
"$SANDBOXER" --quiet destroy "$id" | cat
id=
echo "smoke-agent-dev: passed"
