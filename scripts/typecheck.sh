#!/usr/bin/env bash
# Runs mypy on the package, in the environment that scripts/test.sh makes.
#
#   bash scripts/typecheck.sh [mypy arguments...]
#
# kernels/ and patches/ import as replay_transformers.kernels and replay_transformers.patches. mypy knows modules by
# where their files lie, so it gets a tree of links in which they lie there; messages name the real files.

source "$(dirname "$0")/lib.sh"
[[ -x .venv/bin/mypy ]] || die "mypy is not installed; run scripts/test.sh first"

tree=build/typecheck
rm -rf "$tree"
mkdir -p "$tree/replay_transformers"
ln -s "$root"/replay_transformers/* "$root/kernels" "$root/patches" "$tree/replay_transformers"

cd "$tree"
"$root/.venv/bin/mypy" --config-file "$root/setup.cfg" --cache-dir "$root/.mypy_cache" "$@" -p replay_transformers |
  sed -E 's#^replay_transformers/(kernels|patches)/#\1/#'
