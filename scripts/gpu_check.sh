#!/usr/bin/env bash
# Kernel tests and benchmarks on an NVIDIA GPU, in under eight minutes: programs of a launch really run at once there.
#
#   scripts/gpu_check.sh                  tests on CUDA, then the benchmarks against PyTorch
#   scripts/gpu_check.sh --collect-only   list the tests that would run; needs no GPU
#   scripts/gpu_check.sh --compile 90     compile the same kernels for a compute capability; needs no GPU
#
# Needs Python with torch (CUDA), triton >= 3.6 (not triton-ascend), numpy, pytest, rich, safetensors and typer, and no
# network and no vLLM; PYTHON names the interpreter. A GPU of compute capability 8.9 or newer, for fp8. Kernels that use what
# only triton-ascend has are left out: docs/benchmarks.md lists them. OUT is where the figures go.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-gpu_check}
TEST_SECONDS=270
BENCH_SECONDS=180
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" DSV4_TRITON_TEST_DEVICE=cuda
mode=${1:-run}

"$PYTHON" - "$mode" <<'CHECK'
import sys

try:
    import numpy, pytest, rich, safetensors, torch, triton, typer
except ImportError as error:
    sys.exit(f"gpu_check: {error}")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    sys.exit(f"gpu_check: triton is {triton.__version__}, 3.6 or newer is needed")
if hasattr(triton.language, "extract_slice"):
    sys.exit("gpu_check: this is triton-ascend; upstream Triton is needed")
if sys.argv[1] == "run":
    if not torch.cuda.is_available():
        sys.exit("gpu_check: torch finds no CUDA device; --collect-only and --compile 90 need none")
    major, minor = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, torch {torch.__version__}, "
          f"triton {triton.__version__}")
CHECK

ops=$("$PYTHON" -m dsv4_triton.bench.cuda ops)
files=$(printf 'tests/kernels/test_%s.py\n' $ops)

case $mode in
--collect-only)
    exec "$PYTHON" -m pytest -q --collect-only $files
    ;;
--compile)
    exec "$PYTHON" -m dsv4_triton.bench.cuda compile "${2:-90}"
    ;;
run) ;;
*)
    echo "gpu_check: unknown option $mode; there are --collect-only and --compile CAPABILITY" >&2
    exit 2
    ;;
esac

status=0
mkdir -p "$OUT"
echo "==> tests of $(wc -w <<<"$ops") ops on CUDA"
timeout "$TEST_SECONDS" "$PYTHON" -m pytest -q -rs -p no:cacheprovider $files || status=$?
if [ "$status" = 124 ]; then
    echo "gpu_check: the tests were not done after $TEST_SECONDS s"
fi
echo "==> benchmarks against PyTorch"
# After SIGINT the command writes what it has.
timeout -s INT -k 20 "$BENCH_SECONDS" "$PYTHON" -m dsv4_triton.cli bench --device cuda --seconds 0.2 \
    $(printf -- '--kernel %s ' $ops) --case 'flash/decode/b16*' --case 'flash/prefill/t4096*' \
    --json "$OUT/bench.json" --html "$OUT/bench.html" || status=$?
echo "==> status $status; figures are in $OUT"
exit "$status"
