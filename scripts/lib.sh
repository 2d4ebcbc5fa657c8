# Shared by the shell scripts of this folder: source it, do not run it.
# It moves to the checkout's root, answers --help with the calling script's opening comment, and offers setup_venv.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$(basename "$0")"
  exit 0
fi

torch_version=2.13.0  # installed where there is no NVIDIA GPU; the version the tests run on

say() { printf '%s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the first interpreter that is new enough and can make virtual environments; PYTHON= replaces the list.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.10 or newer with the venv module found; install one (Debian, Ubuntu: apt install python3-venv)" \
    "or name it in PYTHON="
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# install VENV ARGUMENTS...: pip install with the caller's extra arguments (the array pip_args).
install() {
  local venv=$1
  shift
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check ${pip_args[@]+"${pip_args[@]}"} "$@"
}

# Leaves a torch that is already there alone. Without a GPU it asks for the CPU build by name first, since the plain
# name means a CUDA build of several gigabytes on Linux.
install_torch() {
  local venv=$1
  if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    return
  elif has_gpu; then
    install "$venv" 'torch>=2.6' || die "pip could not install torch"
  elif ! install "$venv" "torch==$torch_version+cpu" 2>/dev/null; then
    install "$venv" "torch==$torch_version" || die "pip could not install torch $torch_version"
    if "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
      say "note: pip's sources offered only a CUDA build of torch; for the smaller CPU build, remove $venv and pass" \
        "--extra-index-url with the address of PyTorch's CPU wheels"
    fi
  fi
}

# setup_venv VENV SIZE REQUIREMENTS...: makes the virtual environment and installs into it, unless that was done before
# with the same setup.cfg and the same arguments. SIZE says how much a first run downloads.
setup_venv() {
  local venv=$1 size=$2 stamp=$1/.installed python key
  shift 2
  key=$({ printf '%s\n' "$root" ${pip_args[@]+"${pip_args[@]}"}; cat setup.cfg pyproject.toml; } | cksum)
  if [[ -f $stamp && $(head -n 1 "$stamp") == "$key" ]] && grep -qxF -e "$*" "$stamp"; then
    return
  fi
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || die "$python could not make a virtual environment in $root/$venv"
  fi
  say "Installing into $venv (a first run downloads $size; a second one nothing)"
  install_torch "$venv"
  install "$venv" "$@" || die "pip could not install $*; its own message is above"
  if [[ ! -f $stamp || $(head -n 1 "$stamp") != "$key" ]]; then
    printf '%s\n' "$key" >"$stamp"
  fi
  printf '%s\n' "$*" >>"$stamp"
}
