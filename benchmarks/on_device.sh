#!/usr/bin/env bash
# Measures on a GPU what the README's tables show, each step within a time, in order of worth:
#   bash benchmarks/on_device.sh FOLDER [STEP...]
# The steps' logs and CSV files come to lie in FOLDER; what is measured is kernels_generated.
set -u
folder=${1:?usage: bash benchmarks/on_device.sh FOLDER [STEP...]}
shift
device=${DEVICE:-cuda} python=${PYTHON:-python3}
mkdir -p "$folder"
cd "$(dirname "$0")/.." || exit

# NAME SECONDS COMMAND...: runs it if it is asked for, or if no step is
asked=" $* "
step() {
  local name=$1 seconds=$2 began=$SECONDS
  shift 2
  [[ $asked == "  " || $asked == *" $name "* ]] || return
  timeout -k 5 "$seconds" "$@" >"$folder/$name.log" 2>&1
  echo "$name: status $? after $((SECONDS - began)) s: $(tail -n 1 "$folder/$name.log" | cut -c1-160)"
}
script() { # FILE ARGUMENTS...: the arguments of `step` for a script that writes FILE
  local file=$1 name=$2
  shift 2
  echo "$python benchmarks/$name.py --device $device --output $folder/$file.csv $*"
}

# shellcheck disable=SC2046 # words are arguments
{
  step verify 150 "$python" -m tuner verify attention_backward --device "$device" --template gluon_sm90
  step ablations 150 $(script ablations ablations --kernel attention_backward attention_forward --workload "B=4,H=16,S=4096,D=128,KV=16,T=4096,causal=true,dtype=bfloat16")
  step rows 120 $(script kernels kernels --set h200 --kernel softmax softmax_backward rms_norm rms_norm_backward --seconds 0.1)
  step matmul 120 $(script kernels kernels --set llm --kernel matmul --seconds 0.1 --skip torch.compile)
  step tuning_time 110 $(script tuning_time tuning_time)
  step selection 170 $(script selection selection --budget 10s --seconds 30)
  step captured 110 $(script captured captured_model --budget 40s --batch 4 --length 4096 --width 2048 --heads 16)
  step first_call 120 $(script first_call first_call --kernel matmul attention_backward --starts 2)
  step host 60 $(script host host_overhead --first-call)
  step search 130 $(script search search_device --kernel attention_backward --trials 120 --seconds 110)
  step attention 220 $(script attention attention --skip default --seconds 0.1 --repeats 5)
}
