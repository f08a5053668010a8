#!/usr/bin/env bash
# From a bare machine to a Transformer trained without LayerNorm and without warmup, in one command:
#   bash scripts/quickstart.sh                      spelling to pronunciation (CMUdict), minutes on two cores
#   bash scripts/quickstart.sh g2p_full             the same, wider and longer: an hour
#   bash scripts/quickstart.sh multi30k             German to English (Multi30k), 40 minutes on one core
#   SOURCE=DIR bash scripts/quickstart.sh multi30k  the same with data from DIR instead of the network
#   bash scripts/quickstart.sh brown                a language model of words (the Brown corpus)
#   bash scripts/quickstart.sh brown_characters     a language model of characters
# With --compare it also trains the usual model beside it. Interrupted, the same command goes on.
set -euo pipefail
if [ -n "${SOURCE:-}" ]; then
    case $SOURCE in /*) ;; *) export SOURCE=$PWD/$SOURCE ;; esac
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec "${VENV:-.venv}/bin/python" scripts/quickstart.py "$@"
