#!/usr/bin/env bash
# The longest wait of a running stream while a prompt of a million tokens, 1,047,552, is read beside it: 440 s on an H200, model and
# warming up included. Exit status: the command's, 1 also where the time did not suffice; the JSON then says how many rows were read.
#
#     bash docs/benchmarks/gap_million.sh OUT
#
# FOREBAY: the command (.venv/bin/forebay). SMALL=1: the packaged model and a short prompt on the CPU, to try these lines.
set -uo pipefail
OUT=${1:?a folder for the results}
FOREBAY=${FOREBAY:-.venv/bin/forebay}

if [ -n "${SMALL:-}" ]; then
    MODEL="--demo --device cpu --append-chunk-rows 32"
    ROWS="--rows 100 --usual-tokens 16 --warmup-tokens 4 --append 1024" LIMIT=240
else
    MODEL="glm-5.3-slice-8 --load-format random --device cuda --hot-rows 32768 --force-miss-rate 0.01 --append-chunk-rows 1024"
    ROWS="--rows 50000 --append-after 0 --append 1047552"
    LIMIT=500 # what is left of 570 s beside weights, warming up and the end
fi

mkdir -p "$OUT" || exit
begun=$SECONDS said=done
# SIGTERM ends the measuring as its time does, with a JSON of what was seen; ten seconds later nothing is left to wait for.
timeout --kill-after=10 570 $FOREBAY bench sessions $MODEL --part gap $ROWS --limit "$LIMIT" --log-format json \
    --json "$OUT/gap_million.json" >"$OUT/gap_million.log" 2>&1
status=$?
[ $status -eq 0 ] || said="FAILED ($status)"
echo "$said after $((SECONDS - begun)) s ($OUT/gap_million.log)"
exit $status
