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
PATH=$PATH:/usr/local/sbin:/usr/sbin
export LC_ALL=C

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
TOLLGATE=${TOLLGATE:-$(dirname -- "$HERE")/target/release/tollgate}
readonly GATEWAYS=${GATEWAYS:-4} RATE=${RATE:-4000} SECONDS_OF_LOAD=${SECONDS_OF_LOAD:-10}
readonly CONNECTIONS=40 EPSILON=0.05

WORK=$(mktemp -d)
PIDS=()
PORTS=()
ADMINS=()

finish() {
    for pid in "${PIDS[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    rm -rf "$WORK"
}
trap finish EXIT

for tool in wrk nginx redis-server redis-cli curl; do
    command -v "$tool" >/dev/null || { echo "missing: $tool" >&2; exit 1; }
done
[ -x "$TOLLGATE" ] || { echo "no gateway at $TOLLGATE: cargo build --release" >&2; exit 1; }

# A port that nobody listens on, into REPLY.
NEXT_PORT=$((25000 + $$ % 5000))
free_port() {
    while (exec 3<>"/dev/tcp/127.0.0.1/$NEXT_PORT") 2>/dev/null; do NEXT_PORT=$((NEXT_PORT + 1)); done
    REPLY=$NEXT_PORT
    NEXT_PORT=$((NEXT_PORT + 1))
}

start() {
    "$@" >>"$WORK/log" 2>&1 &
    disown $!
    PIDS+=($!)
}

upstream_start() {
    free_port
    UPSTREAM=$REPLY
    cat >"$WORK/nginx.conf" <<CONF
master_process off; daemon off; pid $WORK/nginx.pid; error_log /dev/null;
events { worker_connections 1024; }
http { log_format at '\$msec \$http_x_api_key'; access_log $WORK/admitted at; keepalive_requests 1000000;
  server { listen 127.0.0.1:$UPSTREAM; location / { return 200 "hello\n"; } } }
CONF
    start nginx -c "$WORK/nginx.conf"
}

gateway_start() {
    free_port; local port=$REPLY
    free_port; local admin=$REPLY
    cat >"$WORK/$port.yaml" <<YAML
threads: 1
listeners: [{address: 127.0.0.1:$port}]
admin: {address: 127.0.0.1:$admin}
store: {redis: {url: redis://127.0.0.1:$REDIS, timeout: 50ms}}
upstreams: {origin: {servers: [127.0.0.1:$UPSTREAM]}}
routes: [{id: all, match: {path: /*}, upstream: origin}]
rules: {rows: [{tenant: hot, capacity: $RATE, refill_per_second: $RATE}]}
hot_keys: {epsilon: $EPSILON}
log: {level: error}
YAML
    start "$TOLLGATE" serve --config "$WORK/$port.yaml"
    PORTS+=("$port")
    ADMINS+=("$admin")
    for _ in $(seq 200); do curl -sfo /dev/null "http://127.0.0.1:$admin/readyz" && return; sleep 0.02; done
    echo "a gateway did not start: $(cat "$WORK/log")" >&2
    exit 1
}

# The sum of the series that match a pattern, over all gateways.
metric() {
    local admin
    for admin in "${ADMINS[@]}"; do curl -s "http://127.0.0.1:$admin/metrics"; done |
        awk -v pattern="$1" '$0 ~ pattern { sum += $NF } END { print sum + 0 }'
}

free_port
REDIS=$REPLY
start redis-server --port "$REDIS" --bind 127.0.0.1 --save '' --appendonly no --dir "$WORK"
until timeout 5 redis-cli -p "$REDIS" PING >/dev/null 2>&1; do sleep 0.02; done
upstream_start
for _ in $(seq "$GATEWAYS"); do gateway_start; done
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
