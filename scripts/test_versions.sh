#!/usr/bin/env bash
# Runs the core tests (marker `core`) on supported versions of transformers, each in an environment of its own,
# .venvs/VERSION.
#
#   bash scripts/test_versions.sh [--smoke] [VERSION...] [pip arguments...]
#
# Without a VERSION: 5.17.0 5.20.2 5.24.0. --smoke runs only the tests that are also marked `smoke`. What follows the
# versions goes to pip, for example --index-url. PYTHON= names an interpreter, PYTEST_ADDOPTS= reaches pytest.

source "$(dirname "$0")/lib.sh"

tests=core
if [[ ${1:-} == --smoke ]]; then
  tests="core and smoke"
  shift
fi
versions=()
while [[ ${1:-} =~ ^[0-9]+(\.[0-9]+)+$ ]]; do
  versions+=("$1")
  shift
done
[[ ${#versions[@]} -gt 0 ]] || versions=(5.17.0 5.20.2 5.24.0)
pip_args=("$@")

failed=()
for version in "${versions[@]}"; do
  setup_venv ".venvs/$version" "about 240 MB" --editable '.[test]' "transformers==$version"
  say "Tests on transformers $version"
  ".venvs/$version/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadgroup -m "$tests" || failed+=("$version")
done
[[ ${#failed[@]} -eq 0 ]] || die "tests failed on transformers ${failed[*]}"
