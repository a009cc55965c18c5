#!/usr/bin/env bash
#
# One hot key on several gateways over HTTP, offered twice its rate: what is admitted of the ideal, how many
# calls of Redis that takes, and whether any window held more than the bound (docs/leases.md). When what was
# admitted is told by the upstream's own log, to the millisecond.
# Everything is on loopback, bounded in time, and ended by the script itself.
#
# Environment: TOLLGATE  gateway binary (default: target/release/tollgate)
#              GATEWAYS  how many (default: 4)
#              RATE      capacity and tokens per second (default: 4000)
#              SECONDS_OF_LOAD (default: 10)
# Needs wrk, nginx, redis-server, redis-cli, curl.

set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
TOLLGATE=${TOLLGATE:-$(dirname -- "$HERE")/target/release/tollgate}
readonly GATEWAYS=${GATEWAYS:-4} RATE=${RATE:-4000} SECONDS_OF_LOAD=${SECONDS_OF_LOAD:-10}
readonly CONNECTIONS=40 EPSILON=0.05

# shellcheck source=loadtest/world.sh
. "$HERE/world.sh"
need wrk nginx redis-server redis-cli curl

UPSTREAM_LOG=$WORK/admitted
upstream_start
redis_start
for _ in $(seq "$GATEWAYS"); do
    gateway_start "rules: {rows: [{tenant: hot, capacity: $RATE, refill_per_second: $RATE}]}
hot_keys: {epsilon: $EPSILON}"
done
sleep 5 # until each may hold something: all others have counted it

calls_before=$(metric '^tollgate_store_calls_total ')
# Each connection asks once in PAUSE ms on average.
pause=$((1000 * CONNECTIONS * GATEWAYS / (2 * RATE)))
loads=()
for port in "${PORTS[@]}"; do
    timeout $((SECONDS_OF_LOAD + 10)) wrk -t1 -c"$CONNECTIONS" "-d${SECONDS_OF_LOAD}s" -s "$HERE/wrk-paced.lua" \
        "http://127.0.0.1:$port/" -- hot "$pause" >"$WORK/load.$port" 2>&1 &
    loads+=($!)
done
wait "${loads[@]}"
calls=$(($(metric '^tollgate_store_calls_total ') - calls_before))
sleep 0.3

sort -n "$WORK/admitted" | awk -v rate="$RATE" -v epsilon="$EPSILON" -v calls="$calls" -v gateways="$GATEWAYS" \
    -v loads="$(cat "$WORK"/load.* | awk '$1 == "RESULT" { n += $2; other += $4; errors += $5 } END { print n, other, errors }')" '
    {
        if (NR == 1) first = $1
        level -= rate * ($1 - at); if (level < 0 || NR == 1) level = 0
        level += 1; at = $1
        if (level > fullest) fullest = level
    }
    END {
        split(loads, l, " ")
        ideal = rate + rate * (at - first); slack = epsilon * rate
        printf "%d gateways, capacity and rate %d: %d asked in %.1f s, %d admitted, %.2f %% of the ideal\n", gateways, rate, l[1], at - first, NR, NR / ideal * 100
        printf "calls of Redis per admitted request: %.4f (%d); fullest window: capacity %+d of a slack of %d\n", calls / NR, calls, fullest - rate, slack
        printf "answers other than 200 and 429: %d; socket errors: %d\n", l[2], l[3]
        exit !(fullest <= rate + slack && l[2] + l[3] == 0)
    }'
