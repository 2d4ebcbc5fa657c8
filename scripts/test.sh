#!/usr/bin/env bash
# Sets everything up in .venv and runs all checks: ruff, mypy, pytest.
#
#   bash scripts/test.sh [pip arguments...]
#
# Arguments go to pip, for example --index-url. PYTHON= names an interpreter, PYTEST_ADDOPTS= reaches pytest
# (PYTEST_ADDOPTS=--run-slow adds the slow tests), WORKERS= sets the number of test processes (2).

source "$(dirname "$0")/lib.sh"
pip_args=("$@")

size="about 570 MB"
has_gpu && size="several GB, most of it torch with CUDA"
setup_venv .venv "$size" --editable '.[dev]'

failed=()
step() {
  say "== $*"
  "$@" || failed+=("$1 ${2:-}")
}
step .venv/bin/ruff check .
step .venv/bin/ruff format --check .
step bash scripts/typecheck.sh
step .venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadgroup
if [[ ${#failed[@]} -gt 0 ]]; then
  list=$(printf ', %s' "${failed[@]}")
  die "failed: ${list:2}"
fi
