#!/usr/bin/env bash
# Install a lock, this checkout and its environments into .venv:  install.sh cpu|gpu STAMP [ENVIRONMENT ...]
# An interrupted install leaves no stamp and is taken up again by the next call.
set -euo pipefail
lock=$1 stamp=$2
shift 2

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 1
}

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        if [ -n "$candidate" ] && is_311 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 was not found; the locks are for that version." \
        "Install python3.11 with its venv module, or say where it is: PYTHON=/path/to/python3.11 make install"
}

[ -f "requirements/$lock.txt" ] || fail "there is no lock requirements/$lock.txt: STAGECOACH_LOCK is cpu or gpu."

# The two engines are two distributions of one package: they must never lie over each other.
if [ -d .venv ] && { ! is_311 .venv/bin/python || [ "$(cat .venv/lock 2>/dev/null || echo "$lock")" != "$lock" ]; }; then
    echo "Removing .venv: it is not of Python 3.11, or holds the other lock"
    rm -rf .venv
fi
if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv .venv || fail "the venv module of $python is missing or broken; on Debian: apt install python3.11-venv"
fi
echo "$lock" > .venv/lock
rm -f .venv/installed-*

echo "Installing requirements/$lock.txt: some gigabytes the first time, a few minutes"
.venv/bin/python -m pip install --disable-pip-version-check --retries 10 -qq --no-deps -r "requirements/$lock.txt" ||
    fail "pip could not install requirements/$lock.txt; what it says is above. Nothing else was changed: try again."
packages=(-e .)
for environment in "$@"; do packages+=(-e "$environment"); done
.venv/bin/python -m pip install --disable-pip-version-check -qq --no-deps --no-build-isolation "${packages[@]}"

# A build of torch for another platform shows only when it is imported.
.venv/bin/python -c 'import torch' ||
    fail "torch does not import. The cpu lock needs a CPU build of torch 2.13.0: point pip at one, for example with" \
        "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, then: make clean install"
touch "$stamp"
echo "Installed; the next call finds it done"
