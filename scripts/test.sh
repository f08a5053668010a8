#!/usr/bin/env bash
# Set everything up and run the linter and the tests. Arguments go to pytest: bash scripts/test.sh tests/test_tfixup.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
bin=${VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
# One thread a process: the tests run side by side, and so do the processes of the distributed ones.
OMP_NUM_THREADS=1 "$bin/python" -m pytest -n auto "$@"
