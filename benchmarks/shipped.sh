#!/usr/bin/env bash
# Everything the README and the model cards say about the shipped drafters, measured again.
#
#   benchmarks/shipped.sh PROMPT_FOLDER RESULT_FOLDER [speed|acceptance|batch ...]
#
# PROMPT_FOLDER holds gsm8k.jsonl, humaneval.jsonl and mt-bench.jsonl, one {"turns": ["..."]} a line. About three quarters of an hour
# on two idle cores; run it with nothing else on the machine. A result that is there already is not measured again.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,8p' "$0"; exit 2; }
prompts=$1 results=$2
shift 2
parts=${*:-speed acceptance batch}
dspine=${DSPINE:-dspine}
mkdir -p "$results"

keep() { # keep NAME COMMAND...: the command's last line of output becomes RESULT_FOLDER/NAME.json
    local file=$results/$1.json
    shift
    [ -s "$file" ] && return
    "$@" | tee /dev/stderr | tail -n 1 >"$file.tmp"
    mv "$file.tmp" "$file"
}

for part in $parts; do
    case $part in
    speed)
        keep speed-gsm8k-dspine $dspine bench speed --prompts "$prompts/gsm8k.jsonl" --limit 100 --max-new-tokens 160
        keep speed-gsm8k-dflash $dspine bench speed --prompts "$prompts/gsm8k.jsonl" --limit 6 --max-new-tokens 160 --drafter dflash
        keep speed-gsm8k-reference $dspine bench speed --prompts "$prompts/gsm8k.jsonl" --limit 4 --max-new-tokens 160 --reference
        ;;
    acceptance)
        for benchmark in gsm8k humaneval mt-bench; do
            for temperature in 0 1; do
                limit=24
                [ "$benchmark-$temperature" = gsm8k-0 ] && limit=100
                for drafter in dspine dflash; do
                    file=$results/acceptance-$benchmark-$drafter-t$temperature.json
                    [ -s "$file" ] || $dspine eval acceptance --prompts "$prompts/$benchmark.jsonl" --limit $limit \
                        --max-new-tokens 160 --drafter $drafter --temperature $temperature --seed 0 --width 8 --batch 16 --output "$file"
                done
            done
        done
        ;;
    batch)
        keep batch-32 $dspine bench batch --prompts "$prompts/gsm8k.jsonl" --rows 32 --max-new-tokens 160
        ;;
    *)
        echo "unknown part: $part (speed, acceptance, batch)" >&2
        exit 2
        ;;
    esac
done
