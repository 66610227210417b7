#!/usr/bin/env bash
# The longest wait of a running stream while a prompt of a million tokens is read beside it, in two parts that together cover the million:
# rows 0 to 524,288, and behind as many made-up rows those up to 1,047,552. A part a call, each within 560 s on an H200. Exit status: the
# command's, 1 also where the time did not suffice; the JSON then says how many rows were read.
#
#     bash docs/benchmarks/gap_million.sh OUT 1|2
#
# FOREBAY: the command (.venv/bin/forebay). SMALL=1: the packaged model and a short prompt on the CPU, to try these lines.
set -uo pipefail
OUT=${1:?a folder for the results}
PART=${2:?which part, 1 or 2}
FOREBAY=${FOREBAY:-.venv/bin/forebay}

if [ -n "${SMALL:-}" ]; then
    MODEL="--demo --device cpu --append-chunk-rows 32"
    STREAM="--rows 100 --usual-tokens 16 --warmup-tokens 4" HALF=512 REST=480 LIMIT=120
else
    MODEL="glm-5.3-slice-8 --load-format random --device cuda --hot-rows 32768 --force-miss-rate 0.01 --append-chunk-rows 1024"
    STREAM="--rows 50000" HALF=524288 REST=523264
    LIMIT=470 # what is left of 560 s beside a minute and a half for weights, warming up, made-up rows and the end
fi

case $PART in
1) ROWS="--append-after 0 --append $HALF" ;;
2) ROWS="--append-after $HALF --append $REST" ;;
*) echo "the part is 1 or 2, not $PART" >&2 && exit 2 ;;
esac

mkdir -p "$OUT" || exit
begun=$SECONDS said=done
# SIGTERM ends the measuring as its time does, with a JSON of what was seen; ten seconds later nothing is left to wait for.
timeout --kill-after=10 550 $FOREBAY bench sessions $MODEL --part gap $STREAM $ROWS --limit "$LIMIT" --log-format json \
    --json "$OUT/gap_million_$PART.json" >"$OUT/gap_million_$PART.log" 2>&1
status=$?
[ $status -eq 0 ] || said="FAILED ($status)"
echo "part $PART: $said after $((SECONDS - begun)) s ($OUT/gap_million_$PART.log)"
exit $status
