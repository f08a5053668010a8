#!/usr/bin/env bash
# Make the virtual environment in which everything here runs: .venv, or the directory that VENV names.
# Needs no root. Finds nothing to do in a second; interrupted, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
stamp=$venv/.coldstart

die() {
    echo "setup: $*" >&2
    exit 1
}

wanted() { # what the environment is made from; the checkout too, which it points to
    pwd -P
    cat setup.py pyproject.toml constraints.txt scripts/setup.sh
}

fingerprint=$(wanted | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then
    exit 0
fi

find_python() { # 3.11 and 3.12 first: fairseq has binary wheels for them
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is missing: install it (python.org, or Debian's python3.11), or name one with PYTHON=/path/to/python3."
}

begun=$venv/.coldstart-begun
if [ -e "$begun" ]; then # an environment of ours, interrupted before it had pip
    rm -rf "$venv"
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
        die "$venv holds something other than a virtual environment with pip: name a new directory with VENV=dir, or move it away."
    fi
    python=$(find_python)
    echo "setup: new virtual environment in $venv ($("$python" --version))"
    mkdir -p "$venv" && touch "$begun" || die "$venv cannot be made: name another directory with VENV=dir."
    "$python" -m venv "$venv" >/dev/null ||
        die "$python cannot make virtual environments: install its venv module (Debian: python3-venv), then run this again."
    rm "$begun"
fi
python=$venv/bin/python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$venv has $("$python" --version), but 3.11 or newer is needed: name another directory with VENV=dir."

if ! "$python" - <<'END'; then
import os, platform, shutil, sys, sysconfig

has_wheel = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 13)
compiler = any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))))
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(not (has_wheel or compiler and headers))
END
    die "fairseq has no binary wheel for this platform and Python, and a C++ compiler or Python's headers are missing to build it:" \
        "install them (Debian: g++ python3-dev; macOS: xcode-select --install), or use Python 3.11 or 3.12 on Linux x86-64."
fi

# A package whose installation was interrupted has no RECORD yet, and pip would take it for installed.
for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
    [ -e "$info/RECORD" ] || rm -rf "$info"
done

pip() { "$python" -m pip --disable-pip-version-check "$@"; }
echo "setup: 1/3 PyTorch"
pip install -c constraints.txt torch numpy cython setuptools wheel
echo "setup: 2/3 fairseq, checked by hash (where there is no wheel, some minutes of C++)"
grep -E '^(ve-fairseq|fairseq-fixed)==' constraints.txt | sed 's/ #: / /' |
    pip install --no-deps --no-build-isolation --require-hashes -r /dev/stdin
echo "setup: 3/3 coldstart and the rest"
pip install -c constraints.txt -e '.[fairseq,plots,dev]'
echo "$fingerprint" >"$stamp"
echo "setup: done, in $venv"
