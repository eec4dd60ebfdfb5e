# shellcheck shell=bash
# What must come from the operating system: processor, Python, libnuma, pyverbs. Sourced by setup.sh.

check_processor() {
    case "$(uname -s) $(uname -m)" in
        "Linux x86_64")
            grep -qw avx2 /proc/cpuinfo ||
                fail "this x86-64 processor has no AVX2, which vLLM for CPU needs" "use another machine" ;;
        "Linux aarch64") ;;
        *) fail "vLLM for CPU exists for Linux on x86-64 and aarch64, not for $(uname -s) on $(uname -m)" "use such a machine" ;;
    esac
}

# python_fits PYTHON: can vLLM for CPU run on it?
python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${MESHFUSION_PYTHON:-}" ]; then
        python_fits "$MESHFUSION_PYTHON" ||
            fail "MESHFUSION_PYTHON=$MESHFUSION_PYTHON is not a Python 3.11 to 3.14" "name another one"
        command -v "$MESHFUSION_PYTHON"
        return
    fi
    for candidate in python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.14; do
        if command -v "$candidate" >/dev/null && python_fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

# python_minor PYTHON: e.g. 3.11
python_minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

has_library() {
    local known  # not piped: grep -q would end ldconfig early, and pipefail call that a failure
    known="$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null || true)"
    [[ "$known" == *"$1"* ]]
}

has_package() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# wants_pyverbs PYTHON: the distribution's pyverbs is built for the distribution's Python only.
wants_pyverbs() {
    [ "${MESHFUSION_RDMA:-1}" != 0 ] && [ -x /usr/bin/python3 ] && [ "$(python_minor "$1")" = "$(python_minor /usr/bin/python3)" ]
}

# missing_packages PYTHON: names of the Debian packages that are not there yet. PYTHON may be empty.
missing_packages() {
    local python="$1"
    if [ -z "$python" ]; then
        echo python3 python3-venv python3-pyverbs
    elif [ "$python" != "$VENV/bin/python" ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "python$(python_minor "$python")-venv"
    fi
    has_library libnuma.so.1 || echo libnuma1
    if [ -n "$python" ] && wants_pyverbs "$python" && ! has_package python3-pyverbs; then
        echo python3-pyverbs
    fi
}

# need_system_packages: sets PYTHON; installs what is missing (root) or says so and stops.
need_system_packages() {
    local missing
    PYTHON="$(find_python)"
    missing="$(missing_packages "$PYTHON" | xargs)"
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null; then
        [ "$missing" = python3-pyverbs ] && return 0  # not a Debian: RDMA is told about later
        fail "missing: $missing (Debian names)" "install what your distribution calls them, then run the same command again"
    fi
    if [ "$(id -u)" != 0 ]; then
        printf 'missing system packages; run:\n' >&2
        printf 'sudo apt-get update && sudo apt-get install -y --no-install-recommends %s\n' "$missing" >&2
        fail "not root, so they were not installed" "run the line above, then the same command again"
    fi
    install_packages "$missing"
    PYTHON="$(find_python)"
    [ -n "$PYTHON" ] ||
        fail "no Python 3.11 to 3.14: the distribution's is $(python_minor /usr/bin/python3)" "install one and name it: MESHFUSION_PYTHON=/path/to/python3.12 $0"
}

# install_packages NAMES: as root.
install_packages() {
    local names="$1" update
    say "installing system packages: $names"
    update="$(apt-get update -qq 2>&1)" || say "apt-get update: ${update##*$'\n'}"
    if [[ "$names" == *python3-pyverbs* ]] && ! apt-cache show python3-pyverbs >/dev/null 2>&1; then
        say "the package sources have no python3-pyverbs (Ubuntu: enable universe); going on without"
        names="${names/python3-pyverbs/}"
    fi
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $names >/dev/null ||
        fail "apt-get install $names failed (see above)" "check the network and the package sources, then run the same command again"
}

# need_disk PATH GIB
need_disk() {
    local free_kib
    free_kib="$(df -Pk "$1" | awk 'NR == 2 { print $4 }')"
    [ "$free_kib" -ge $(($2 * 1024 * 1024)) ] ||
        fail "$1 has $((free_kib / 1024)) MiB free, the setup needs about $2 GiB" "free some space, or name a folder on another disk: MESHFUSION_VENV=/path/to/venv"
}

# want_browser: for the nightly tests of the status page. Without one these fail, and say so; nothing else needs it.
want_browser() {
    local name
    for name in chromium-headless-shell chromium google-chrome; do
        command -v "$name" >/dev/null && return 0
    done
    command -v apt-get >/dev/null || return 0
    if [ "$(id -u)" != 0 ]; then
        say "no browser; for the tests of the status page: sudo apt-get install -y --no-install-recommends chromium-headless-shell"
        return 0
    fi
    need_disk / 1
    install_packages chromium-headless-shell
}

# want_emulator: for the nightly tests of images for another processor; as want_browser.
want_emulator() {
    command -v qemu-aarch64 >/dev/null && return 0
    command -v qemu-aarch64-static >/dev/null && return 0
    command -v apt-get >/dev/null || return 0
    if [ "$(id -u)" != 0 ]; then
        say "no emulator; for the tests of images: sudo apt-get install -y --no-install-recommends qemu-user"
        return 0
    fi
    install_packages qemu-user
}

# want_checkers: those of other projects that tests let look at what we write for them, such as container images, what
# makes headers of encrypted drives, and the library with which the fake rshim is a file system. Without one its test is
# skipped with that reason, or fails, and in CI the run fails.
want_checkers() {
    local missing=""
    command -v logrotate >/dev/null || [ -x /usr/sbin/logrotate ] || missing="logrotate"
    command -v systemd-analyze >/dev/null || missing="$missing systemd"
    command -v cryptsetup >/dev/null || [ -x /usr/sbin/cryptsetup ] || missing="$missing cryptsetup-bin"
    has_library libfuse3.so || missing="$missing fuse3"
    command -v skopeo >/dev/null || missing="$missing skopeo"
    command -v umoci >/dev/null || missing="$missing umoci"
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || return 0
    install_packages "$(echo "$missing" | xargs)"
}
