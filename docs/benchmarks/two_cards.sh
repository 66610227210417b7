#!/usr/bin/env bash
# All that two cards of one host are to show: owner and peer, two mirrors, two nodes over loopback, many sessions. A step each, with its JSON
# and its log in a folder; a step that fails is said, and the others go on, as do the commands of a step. Exit status: how many failed.
#
#     bash docs/benchmarks/two_cards.sh OUT [link tests decode graphs million replicas gate drafts nodes many ...]
#
# FOREBAY, PYTHON: the commands (.venv/bin/forebay and .venv/bin/python; where there is no .venv, "python3 server.py" and python3).
# GRAPHS: on or off, of all pairs but those of `decode` (off) and `graphs` (on). LIMIT: seconds that a command may take. TESTS: which tests,
# as pytest's -k says it.
# SMALL=1: the packaged model and short histories on the CPU, to try these lines.
set -uo pipefail
OUT=${1:?a folder for the results}
shift
STEPS=${*:-link tests decode graphs million replicas gate drafts nodes many}
FOREBAY=${FOREBAY:-.venv/bin/forebay}
PYTHON=${PYTHON:-.venv/bin/python}
LIMIT=${LIMIT:-540}
mkdir -p "$OUT"

if [ -n "${SMALL:-}" ]; then
    MODEL="--demo --device cpu --host-memory 512MiB" PEER="--peer cpu" LAYERS=2
    HISTORY="--history synthetic:7:700 --prompt-tokens 60" MILLION="--history synthetic:7:900 --prompt-tokens 60" NEW=12
    ROOM="" ROOM_MILLION="" MANY="--sessions 2 --rows 300 --new-tokens 160 --alone-tokens 4 --warmup-tokens 2" MANY_MODEL=$MODEL
else
    MODEL="glm-5.3-slice --load-format random --device cuda --force-miss-rate 0.01" PEER="--peer cuda:1" LAYERS=2
    HISTORY="--history synthetic:7:49000 --prompt-tokens 1023" MILLION="--history synthetic:7:1047200" NEW=1024
    ROOM="--host-memory 2GiB --context-max 65536" ROOM_MILLION="--host-memory 10GiB"
    MANY="--sessions 30 --rows 1047552 --new-tokens 1024 --host-memory 200GiB"
    MANY_MODEL="glm-5.3-slice-8 --load-format random --device cuda --force-miss-rate 0.01 --hot-rows 32768"
fi
PAIR="$PEER --graphs ${GRAPHS:-on}"

all() { # the commands of a step, a line each, whatever became of those before
    local failed=0 line
    while read -r line; do
        [ -z "$line" ] || timeout -k 10 "$LIMIT" $line </dev/null || { echo "FAILED: $line"; failed=1; }
    done
    return $failed
}

link() { # what a pair takes for granted, one thing after another, and how fast the cards reach one another; no model
    [ -z "${SMALL:-}" ] || { echo "needs cards"; return 0; }
    PYTHONPATH=. timeout -k 10 "$LIMIT" $PYTHON docs/benchmarks/two_cards_link.py "$OUT/link.json"
}

decode() { # one card, then two, at 50,000 rows: tokens and steps of both placements; a pair's operations submitted apart
    all <<EOF
$FOREBAY bench decode $MODEL $ROOM $HISTORY --placements resident,offload --new-tokens $NEW --json $OUT/one_50k.json
$FOREBAY bench decode $MODEL $PEER --graphs off $ROOM $HISTORY --placements resident,offload --new-tokens $NEW --json $OUT/pair_50k.json
EOF
}

graphs() { # a graph a card
    all <<EOF
$FOREBAY bench decode $MODEL $PEER --graphs on $ROOM $HISTORY --placements resident,offload --new-tokens $NEW --json $OUT/graphs_50k.json
EOF
}

million() { # the same at a million rows
    all <<EOF
$FOREBAY bench decode $MODEL $ROOM_MILLION $MILLION --placements offload --new-tokens $NEW --json $OUT/one_1m.json
$FOREBAY bench decode $MODEL $PAIR $ROOM_MILLION $MILLION --placements resident,offload --new-tokens $NEW --json $OUT/pair_1m.json
EOF
}

replicas() { # a mirror a card: twice the host memory for as many rows
    all <<EOF
$FOREBAY bench decode $MODEL $PAIR --mirror-replicas 2 $ROOM $HISTORY --placements offload --new-tokens $NEW --json $OUT/mirrors_50k.json
EOF
}

gate() {
    all <<EOF
$FOREBAY gate $MODEL $PAIR $ROOM $HISTORY --new-tokens $NEW --together --pairs 3 --null-pairs 1 --json $OUT/gate.json
EOF
}

drafts() {
    all <<EOF
$FOREBAY gate $MODEL $PAIR $ROOM $HISTORY --new-tokens $NEW --together --pairs 3 --null-pairs 1 --draft-depth 3 --force-accept-rate 0.65 --json $OUT/gate_drafts.json
EOF
}

many() { # as many sessions as fit, a million rows each, over one mirror
    all <<EOF
$FOREBAY bench sessions $MANY_MODEL $PAIR $MANY --json $OUT/many.json
EOF
}

nodes() { # two stages of one card each, as two processes over loopback: a load, and the answers of one process
    local key=$OUT/key one=7183 head=8183 alone=8184 pids=() failed=0
    head -c 24 /dev/urandom | base64 >"$key"
    CUDA_VISIBLE_DEVICES=1 $FOREBAY node $MODEL $ROOM --listen "127.0.0.1:$one" --stage 0 --stages "$LAYERS" --key-file "$key" &
    pids+=($!)
    CUDA_VISIBLE_DEVICES=0 $FOREBAY serve $MODEL $ROOM --nodes "127.0.0.1:$one" --stages "$LAYERS" --key-file "$key" --port "$head" &
    pids+=($!)
    asked "$head" two "${pids[@]}" || failed=1
    CUDA_VISIBLE_DEVICES=0 $FOREBAY serve $MODEL $ROOM --port "$alone" &
    asked "$alone" one $! || failed=1
    cmp "$OUT/answer_one.json" "$OUT/answer_two.json" || failed=1
    return $failed
}

asked() { # PORT NAME PIDS...: the answer and a load of a server, whose processes are ended then
    local port=$1 name=$2 failed=0
    shift 2
    if answers "$port" "$name" "$@"; then
        timeout -k 10 "$LIMIT" $FOREBAY bench serve --port "$port" --sessions 4 --concurrency 2 --new-tokens "$NEW" \
            --json "$OUT/serve_$name.json" || failed=1
    else
        failed=1
    fi
    kill "$@" 2>/dev/null
    wait "$@"
    return $failed
}

answers() { # PORT NAME PIDS...: the token ids that a server answers with, once it is ready; no longer than its processes live
    timeout -k 10 "$LIMIT" $PYTHON - "$1" "$NEW" "${@:3}" >"$OUT/answer_$2.json" <<'EOF'
import json, os, sys, time, urllib.error, urllib.request

root, new = f"http://127.0.0.1:{sys.argv[1]}", int(sys.argv[2])
while True:
    try:
        urllib.request.urlopen(root + "/ready")
        break
    except (urllib.error.URLError, ConnectionError):
        for process in map(int, sys.argv[3:]):
            os.kill(process, 0)  # raises when it has ended
        time.sleep(1)
body = {"prompt": [3 + 7 * place % 89 for place in range(300)], "max_tokens": new, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
request = urllib.request.Request(root + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["token_ids"])
EOF
}

tests() { # all skipped is no result
    [ -z "${SMALL:-}" ] || { echo "needs cards"; return 0; }
    $PYTHON -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)' || { echo "there are no two cards"; return 1; }
    # Two graphs on one card have more branches than a driver has queues for, unless it is told so before it starts.
    CUDA_DEVICE_MAX_CONNECTIONS=32 timeout -k 10 "$LIMIT" $PYTHON -m pytest -v -m gpu -p no:benchmark --junitxml "$OUT/tests.xml" ${TESTS:+-k "$TESTS"} \
        tests/engine/test_two_cards.py tests/engine/test_pair_graphs_on_device.py
}

failed=0
for step in $STEPS; do
    begun=$SECONDS
    if "$step" >"$OUT/$step.log" 2>&1; then said=done; else said=FAILED failed=$((failed + 1)); fi
    echo "$step: $said after $((SECONDS - begun)) s ($OUT/$step.log)"
done
exit $failed
