#!/usr/bin/env bash
# Make .venv with a Python that fits, then fill it (install.py):  install.sh cpu|gpu STAMP [ENVIRONMENT ...]
# An interrupted install leaves no stamp and is taken up again by the next call.
set -euo pipefail
lock=$1 stamp=$2

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 1
}

# CPython 3.11 to 3.13 of 64 bits, with its global lock: for these there are wheels of all that the locks name.
FITS='
import sys, sysconfig
fits = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 13) and sys.maxsize > 2**32
sys.exit(not fits or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))'
fits() { "$1" -c "$FITS" 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "PYTHON=$PYTHON is no CPython 3.11 to 3.13"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    bring_python
}

# Have uv bring a Python. uv is the one at hand, or comes through the pip of a Python that does not fit itself.
bring_python() {
    local uv folder advice
    advice="Install Python 3.11, 3.12 or 3.13 with its venv module (on Debian: apt install python3 python3-venv), or say"
    advice+=" where one is: PYTHON=/path/to/python make install"
    folder=$(mktemp -d)
    uv=$(command -v uv || pip_brings_uv "$folder") ||
        fail "there is no Python 3.11 to 3.13, nor uv or a Python with pip that could bring one" "$advice"
    echo "No Python 3.11 to 3.13 was found: uv brings 3.11" >&2
    "$uv" python install 3.11 >&2 || fail "uv could not bring Python 3.11; what it says is above" "$advice"
    "$uv" python find --managed-python 3.11
    rm -rf "$folder"
}

pip_brings_uv() {
    local candidate
    for candidate in python3 python; do
        if "$candidate" -m pip install --disable-pip-version-check -q --target "$1" uv >/dev/null 2>&1; then
            echo "$1/bin/uv"
            return
        fi
    done
    return 1
}

make_environment() {
    echo "Making .venv with $("$1" --version)"
    "$1" -m venv .venv && return
    # Debian's Python comes without what its venv module needs; uv makes an environment with any.
    command -v uv >/dev/null && uv venv --quiet --clear --seed --python "$1" .venv
}

# An old driver is told of before gigabytes are fetched. It stops nothing: another machine may use this environment.
MIN_DRIVER=580
look_at_driver() {
    local driver needs="the gpu lock is for CUDA 13, which needs NVIDIA's driver $MIN_DRIVER or newer"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
    case "${driver%%.*}" in
        "" | *[!0-9]*) echo "install: $needs; none answers on this machine" ;;
        *) [ "${driver%%.*}" -ge "$MIN_DRIVER" ] ||
            echo "install: $needs; this machine has ${driver%%$'\n'*}. Update it, or take STAGECOACH_LOCK=cpu" ;;
    esac >&2
}

case "$(uname -s) $(uname -m)" in
    "Linux x86_64" | "Linux aarch64") ;;
    *) fail "the engine, vLLM, comes for Linux on x86-64 and aarch64 alone, and this is $(uname -s) on $(uname -m)." \
        "Use the container: docker build -f deploy/Dockerfile -t stagecoach .   (see deploy/README.md)" ;;
esac
[ -f "requirements/$lock.txt" ] || fail "there is no lock requirements/$lock.txt: STAGECOACH_LOCK is cpu or gpu."
[ "$lock" != gpu ] || look_at_driver

# The two engines are two distributions of one package: they must never lie over each other.
if [ -d .venv ] && { ! fits .venv/bin/python || ! .venv/bin/python -c 'import pip' 2>/dev/null ||
    [ "$(cat .venv/lock 2>/dev/null || echo "$lock")" != "$lock" ]; }; then
    echo "Removing .venv: it has no Python 3.11 to 3.13 with pip, or holds the other lock"
    rm -rf .venv
fi
if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    make_environment "$python" ||
        fail "the venv module of $python is missing or broken; on Debian: apt install python3-venv"
fi
echo "$lock" > .venv/lock
rm -f .venv/installed-*
# What an installation left from before the distribution was called stagecoach-rl.
rm -rf .venv/lib/python3*/site-packages/{torchvision_cpu.*,__editable__?stagecoach?0*,stagecoach-0*.dist-info}
.venv/bin/python requirements/install.py "$@"
# Prefect's tables, seven seconds that the first run would wait for. It makes them itself where this fails.
.venv/bin/python -P flows/orchestration/server_process.py >/dev/null 2>&1 || true
touch "$stamp"
echo "Installed; the next call finds it done"
