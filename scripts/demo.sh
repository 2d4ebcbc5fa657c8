#!/usr/bin/env bash
# Sets everything up in .venv and runs the demonstration: `replay-transformers demo`.
#
#   bash scripts/demo.sh [pip arguments...]
#
# Arguments go to pip, for example --index-url. PYTHON= names an interpreter.

source "$(dirname "$0")/lib.sh"
pip_args=("$@")

size="about 240 MB"
has_gpu && size="several GB, most of it torch with CUDA"
setup_venv .venv "$size" --editable .
exec .venv/bin/replay-transformers demo
