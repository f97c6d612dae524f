#!/usr/bin/env bash
# Everything that only a GPU can show, in one go: tests on many processes first, then, alone on the machine, the measurements.
# Usage: benchmarks/on_gpu.sh OUTPUT_FOLDER [tests|slow|bench|layer|soak|notebooks|two ...]   (default: tests bench layer soak)
# Needs no command-line extra. Each step has its own log and result file there, and a time limit, so that one that hangs does not take the others with it.
set -uo pipefail
out=$(realpath "$1"); shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
export XLA_PYTHON_CLIENT_PREALLOCATE=false

step() { # name, seconds, command
    local name=$1 seconds=$2; shift 2
    local begin=$SECONDS
    timeout "$seconds" "$@" > "$out/$name.log" 2>&1
    echo "$name: exit $?, $((SECONDS - begin)) s" | tee -a "$out/steps.txt"
}

for what in "${@:-tests bench layer soak}"; do for name in $what; do case $name in
    # Building cuDNN's closure takes a minute or two on one core: before the tests, which all need it.
    tests) step build 300 python3 -c "
from mla_interop import MODELS, MLAPrefillSelectorConfig
from mla_interop.warmup import warm_up
for made in warm_up(MLAPrefillSelectorConfig(dimensions=MODELS['deepseek-v3'].dimensions, num_heads=128), ('FLASH_ATTN', 'FLASHINFER', 'CUDNN')):
    print(made, flush=True)"
           MLA_INTEROP_RESULTS="$out/contract.json" step tests 400 python3 -m pytest -q -n 12 -m "gpu and not slow" -p no:cacheprovider -p no:benchmark --timeout 90 tests ;;
    slow)  step slow_tests 400 python3 -m pytest -q -n 14 -m "gpu and slow" -p no:cacheprovider -p no:benchmark --timeout 300 tests ;;
    bench) step bench 480 python3 -c "
import pathlib, sys
from mla_interop.bench.run import measure, save
save(measure('cuda', ['bfloat16'], report=lambda row: print(row, flush=True)), pathlib.Path(sys.argv[1]))" "$out/h200.json" ;;
    layer) step layer 150 python3 -m mla_interop.bench.layer --out "$out/h200_layer.json" ;;
    soak)  step soak 240 python3 -c "
import json
from mla_interop.bench import overheads
for soak in (overheads.torch_soak, overheads.soak):
    print(json.dumps(soak('cuda')), flush=True)" ;;
    notebooks) step notebooks 200 python3 benchmarks/render_notebooks.py "$out/notebooks" ;;
    two)   step two_tests 200 python3 -m pytest -v -n 8 -m "gpu and not slow" -p no:cacheprovider -p no:benchmark --timeout 150 tests/gpu/test_*_two_gpus.py
           step two_bench 150 python3 -m mla_interop.bench.two_gpus --out "$out/h200_x2.json" ;;
    *)     echo "unknown step: $name" >&2; exit 2 ;;
esac; done; done
grep -hE "^(FAILED|ERROR)|passed|failed" "$out"/*tests.log | cut -c1-200
