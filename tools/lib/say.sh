# shellcheck shell=bash
# Lines for the person who waits: what is being done, and what to do when it cannot be. Sourced by setup.sh.

say() { printf '[%4d s] %s\n' "$SECONDS" "$*" >&2; }

# fail MESSAGE NEXT_STEP
fail() {
    printf '\nerror: %s\n  next step: %s\n' "$1" "$2" >&2
    exit 1
}

# explain_pip_failure LOG WHAT: name the likely cause of a failed pip run.
explain_pip_failure() {
    local log="$1" what="$2"
    tail -n 15 "$log" >&2
    if grep -qi 'no space left' "$log"; then
        fail "$what: the disk is full" "free some space, then run the same command again"
    elif grep -qiE 'name resolution|connection (error|refused|reset|aborted)|newconnection|timed out|proxyerror|sslerror|network is unreachable|retrying' "$log"; then
        fail "$what: pip could not reach the package index" "check the network and 'pip config list', then run the same command again"
    elif grep -qiE 'no matching distribution|could not find a version' "$log"; then
        fail "$what: pip found no fitting package (see above)" "use Python 3.11 to 3.14 (MESHFUSION_PYTHON=...) or name an index that has it (PIP_EXTRA_INDEX_URL=URL)"
    fi
    fail "$what: pip failed (log: $log)" "see the lines above; the same command may be run again"
}
