#!/usr/bin/env bash
# Measures what results/ holds, on this machine's GPU, in parts: each goes on where its JSON file ends.
#
#   bash scripts/measure.sh [PART...]
#
# Parts, in their order: kernels, precisions, generate, largest, speculation, text, divergence, tables (the plots in docs/
# and the tables of the README); and gpus, for two GPUs or more, which runs only if it is named. MINUTES= ends each
# benchmark after so much time, REDO=1 measures anew what the files have, MAMBA_SSM= names the folder mamba_ssm of
# mamba-ssm's sources, PYTHON= an interpreter that has the package (by default .venv/bin/python, or python3
# where there is none).

source "$(dirname "$0")/lib.sh"

python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
common=(${MINUTES:+--minutes "$MINUTES"} ${REDO:+--redo})
stock=(${MAMBA_SSM:+--mamba-ssm-source "$MAMBA_SSM"})
small=(--preset nemotron-3-nano-4b --preset qwen3.5-4b)
large=(--preset nemotron-3-super-120b-a12b --preset qwen3.5-122b-a10b)
copies=(--checkpoint float32/bfloat16 --checkpoint float32/fp8 --checkpoint float32/nvfp4)

bench() {
  local script=$1
  shift
  say "scripts/$script $*"
  "$python" "scripts/$script" ${common[@]+"${common[@]}"} "$@"
}

bench_generate() { bench bench_generate.py ${stock[@]+"${stock[@]}"} "$@"; }

kernels() {
  bench bench_kernels.py "${small[@]}" --batch 256 --batch 8 --batch 1 --checkpoint float32 --profile
  bench bench_kernels.py "${large[@]}" --batch 256 --batch 8 --batch 1 --checkpoint float32 --profile
  bench bench_kernels.py --batch 32 --batch 64 --batch 128 --batch 512 --checkpoint float32
}

precisions() {
  local form every=()
  for form in float32 float32/bfloat16 float32/fp8 float32/nvfp4 fp8 nvfp4 bfloat16 float32/s0.001; do
    every+=(--checkpoint "$form")
  done
  bench bench_kernels.py "${small[@]}" --batch 256 --tokens 1 --profile "${every[@]}"
  skipped
}

# heads that forget faster and faster, up to time steps of 8: a file of its own, since its cells have the same names
skipped() {
  local longest
  for longest in 0.5 2 8; do
    bench bench_kernels.py "${small[@]}" --batch 256 --tokens 1 --checkpoint float32/s0.001 --time-steps 0.001 "$longest" \
      --output "results/skip-$longest.json"
  done
}

generate() {
  bench_generate "${small[@]}" --shape 256x64 --shape 1x64 --profile
  bench_generate "${small[@]}" --shape 256x64 "${copies[@]}" --only replay_static@
  bench_generate "${small[@]}" --shape 8x64 --shape 32x64 --shape 8x4096 --shape 8x32768
}

largest() {
  local states=(--checkpoint float32 --checkpoint bfloat16 --checkpoint fp8 --checkpoint nvfp4)
  bench_generate "${small[@]}" "${states[@]}" "${copies[@]}" --largest-batch replay_static_graphs
  bench_generate "${small[@]}" --shape 512x64 --largest-batch dynamic
}

speculation() {
  bench bench_speculative.py "${small[@]}" --backend cudagraphs --tokens 5 --batch 1 --batch 32 --batch 256 --profile
  # without drafts inductor may be the faster one
  bench bench_speculative.py "${small[@]}" --tokens 5 --batch 1 --batch 32 --batch 256 --only /generate/
  bench bench_speculative.py "${small[@]}" --backend cudagraphs --tokens 5 --batch 32 --chance 0.8 --only /replay/
  bench bench_speculative.py "${small[@]}" --backend cudagraphs
}

text() {
  bench bench_speculative.py --real --backend cudagraphs --texts 4 --prompt 256 --new-tokens 128
}

divergence() {
  bench eval_precision.py --together 12  # the sample models are small
  bench eval_precision.py --synthetic
}

gpus() {
  local large=(--preset nemotron-3-super-120b-a12b --weights-gib 115) count
  local chosen=(--only /dynamic/ --only /replay_static_graphs/)  # inductor's graphs stop at a second GPU
  for count in 2 1; do  # one GPU holds fewer of its layers
    bench_generate "${large[@]}" --gpus "$count" --shape 1x64 --shape 32x64 "${chosen[@]}"
    bench bench_speculative.py "${large[@]}" --gpus "$count" --backend cudagraphs --tokens 5 --batch 1 --batch 4
    bench_generate "${small[@]}" --gpus "$count" --shape 1x64 --shape 256x64 "${chosen[@]}"
    bench bench_speculative.py "${small[@]}" --gpus "$count" --backend cudagraphs --tokens 5 --batch 1 --batch 32
  done
}

tables() {
  "$python" scripts/plot_results.py
}

usual=(kernels precisions generate largest speculation text divergence tables)
parts=("$@")
[[ $# -gt 0 ]] || parts=("${usual[@]}")
for part in "${parts[@]}"; do
  [[ " ${usual[*]} gpus " == *" $part "* ]] || die "there is no part $part; see --help"
done
for part in "${parts[@]}"; do "$part"; done
