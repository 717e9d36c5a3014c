#!/bin/sh
# Prints the path of a Python 3.12 or 3.13 that can make the virtual environment and build the engine: with venv, pip's
# bootstrap and its C headers. PYTHON=... names one; otherwise PATH, pyenv, /usr/local, /opt, conda and uv are searched.
# Where there is none, says what was looked at and why it was not taken.

refused=""

# Prints the interpreter's own path if it will do; else why not, with exit code 1.
check() {
    "$1" - <<'PROBE' 2>/dev/null || { code=$?; [ $code -eq 9 ] || echo "does not run"; return 1; }
import sys
def no(why):
    print(why)
    sys.exit(9)
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info[:2] not in ((3, 12), (3, 13)):
    no("is Python " + version)
import os, sysconfig
for module in ("venv", "ensurepip"):
    try:
        __import__(module)
    except ImportError:
        no("Python " + version + " without " + module + " (Debian, Ubuntu: apt-get install python3-venv)")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    no("Python " + version + " without its C headers (Debian, Ubuntu: apt-get install python3-dev)")
print(os.path.realpath(sys.executable) if sys.prefix == sys.base_prefix else sys.executable)
PROBE
}

try() {
    # Links and folders that are not there come in as they are written.
    command -v "$1" >/dev/null 2>&1 || return 1
    if found=$(check "$1"); then
        echo "$found"
        exit 0
    fi
    refused="$refused
  $1: $found"
}

if [ -n "$PYTHON" ]; then
    if ! command -v "$PYTHON" >/dev/null 2>&1; then
        echo "PYTHON=$PYTHON is no program; name a Python 3.12 or 3.13, or leave PYTHON out to have one looked for" >&2
        exit 1
    fi
    try "$PYTHON"
    echo "PYTHON=$PYTHON will not do: it $found; name a Python 3.12 or 3.13 with venv and its headers" >&2
    exit 1
fi

for candidate in \
    python3.12 python3.13 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python3 \
    /usr/local/bin/python3.12 /usr/local/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.13 \
    /opt/python*/bin/python3 /opt/*/bin/python3.12 /opt/*/bin/python3.13 \
    "${CONDA_PREFIX:-/nowhere}"/bin/python3 \
    "$HOME"/miniconda3/bin/python3 "$HOME"/miniconda3/envs/*/bin/python3 \
    "$HOME"/miniforge3/bin/python3 "$HOME"/miniforge3/envs/*/bin/python3 \
    "$HOME"/anaconda3/bin/python3 "$HOME"/anaconda3/envs/*/bin/python3 \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.12*/bin/python3 \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.13*/bin/python3; do
    try "$candidate"
done

{
    echo "no Python 3.12 or 3.13 was found on PATH, nor under pyenv, /usr/local, /opt, conda or uv."
    [ -z "$refused" ] || echo "Looked at:$refused"
    echo "Install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv python3.12-dev), or name one: make PYTHON=/path/to/python3.12"
} >&2
exit 1
