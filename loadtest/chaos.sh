#!/usr/bin/env bash
#
# Break Redis in every way under load on two gateways, and print a table: what failed, how long requests
# took before, during and after, what was admitted against the ideal, how long the way back took.
# Everything is on loopback, bounded in time, and ended by the script itself.
#
# Environment: TOLLGATE  gateway binary (default: target/release/tollgate)
#              FAULTS    names of the faults to run, by word (default: all)
#              DURING    seconds that a fault lasts (default: 3)
# Needs wrk, nginx, redis-server, redis-cli, curl; iptables as root for `drop`.

set -euo pipefail
PATH=$PATH:/usr/local/sbin:/usr/sbin
export LC_ALL=C

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
TOLLGATE=${TOLLGATE:-$(dirname -- "$HERE")/target/release/tollgate}
FAULTS=${FAULTS:-none kill kill-saved stop pause sleep drop oom flush busy password replica}
readonly CAPACITY=200 RATE=100 BEFORE=2 DURING=${DURING:-3} AFTER=3

WORK=$(mktemp -d)
PIDS=()
DROPPED=''

finish() {
    [ -z "$DROPPED" ] || drop_rules -D 2>/dev/null || true
    for pid in "${PIDS[@]}"; do
        kill -CONT "$pid" 2>/dev/null || true
        kill -9 "$pid" 2>/dev/null || true
    done
    rm -rf "$WORK"
}
trap finish EXIT

for tool in wrk nginx redis-server redis-cli curl; do
    command -v "$tool" >/dev/null || { echo "missing: $tool" >&2; exit 1; }
done
[ -x "$TOLLGATE" ] || { echo "no gateway at $TOLLGATE: cargo build --release" >&2; exit 1; }

# A port that nobody listens on, into REPLY.
NEXT_PORT=$((20000 + $$ % 5000))
free_port() {
    while (exec 3<>"/dev/tcp/127.0.0.1/$NEXT_PORT") 2>/dev/null; do NEXT_PORT=$((NEXT_PORT + 1)); done
    REPLY=$NEXT_PORT
    NEXT_PORT=$((NEXT_PORT + 1))
}

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }
cli() { timeout 5 redis-cli -p "$REDIS_PORT" "$@" >/dev/null 2>&1; }

redis_start() {
    (cd "$WORK" && exec redis-server --port "$REDIS_PORT" --bind 127.0.0.1 --save '' --appendonly no \
        --enable-debug-command yes --busy-reply-threshold 100 >/dev/null 2>&1) &
    REDIS_PID=$!
    disown "$REDIS_PID" # killed on purpose: the shell need not tell
    PIDS+=("$REDIS_PID")
    for _ in $(seq 200); do cli PING && return; sleep 0.02; done
}

nginx_start() {
    free_port
    UPSTREAM=$REPLY
    cat >"$WORK/nginx.conf" <<CONF
master_process off; daemon off; pid $WORK/nginx.pid; error_log /dev/null;
events { worker_connections 1024; }
http { access_log off; keepalive_requests 1000000;
  server { listen 127.0.0.1:$UPSTREAM; location / { return 200 "hello\n"; } } }
CONF
    nginx -c "$WORK/nginx.conf" >/dev/null 2>&1 &
    disown $!
    PIDS+=($!)
}

gateway_start() {
    local name=$1
    free_port; local port=$REPLY
    free_port; local admin=$REPLY
    cat >"$WORK/$name.yaml" <<YAML
listeners: [{address: 127.0.0.1:$port}]
admin: {address: 127.0.0.1:$admin}
store: {redis: {url: redis://127.0.0.1:$REDIS_PORT}}
upstreams: {origin: {servers: [127.0.0.1:$UPSTREAM]}}
routes: [{id: all, match: {path: /*}, upstream: origin}]
rules:
  rows:
    - {tenant: open, capacity: 1000000000, refill_per_second: 1000000000}
    - {tenant: limited, capacity: $CAPACITY, refill_per_second: $RATE}
log: {level: error}
YAML
    "$TOLLGATE" serve --config "$WORK/$name.yaml" >"$WORK/$name.log" 2>&1 &
    disown $!
    PIDS+=($!)
    GATEWAYS+=("$port $admin $!")
    for _ in $(seq 200); do
        curl -sfo /dev/null "http://127.0.0.1:$admin/readyz" && curl -so /dev/null "http://127.0.0.1:$port/" && return
        sleep 0.02
    done
    echo "the gateway did not start: $(cat "$WORK/$name.log")" >&2
    exit 1
}

# One phase of load on both gateways: its results into $WORK/PHASE.N
load() {
    local phase=$1 seconds=$2 n=0 gateway
    LOADS=()
    for gateway in "${GATEWAYS[@]}"; do
        n=$((n + 1))
        timeout $((seconds + 10)) wrk -t1 -c4 "-d${seconds}s" -s "$HERE/wrk-status.lua" \
            "http://127.0.0.1:${gateway%% *}/" >"$WORK/$phase.$n" 2>&1 &
        LOADS+=($!)
    done
}

drop_rules() {
    iptables "$1" INPUT -i lo -p tcp --dport "$REDIS_PORT" -j DROP
    iptables "$1" INPUT -i lo -p tcp --sport "$REDIS_PORT" -j DROP
}

break_redis() {
    case $1 in
        none) ;;
        kill) kill -9 "$REDIS_PID" ;;
        kill-saved) cli SAVE; kill -9 "$REDIS_PID" ;;
        stop) kill -STOP "$REDIS_PID" ;;
        pause) cli CLIENT PAUSE $((DURING * 1000)) ALL ;;
        sleep) (redis-cli -p "$REDIS_PORT" DEBUG SLEEP "$DURING" >/dev/null 2>&1 &) ;;
        drop) DROPPED=yes; drop_rules -I ;;
        oom) cli CONFIG SET maxmemory 1mb ;;
        flush) cli SCRIPT FLUSH ;;
        busy) (redis-cli -p "$REDIS_PORT" EVAL 'while true do end' 0 >/dev/null 2>&1 &) ;;
        password) cli CONFIG SET requirepass changed; cli -a changed CLIENT KILL TYPE normal ;;
        replica) cli REPLICAOF 127.0.0.1 1 ;;
        *) echo "no such fault: $1" >&2; exit 1 ;;
    esac
}

heal_redis() {
    case $1 in
        kill | kill-saved) redis_start ;;
        stop) kill -CONT "$REDIS_PID" ;;
        drop) drop_rules -D; DROPPED='' ;;
        oom) cli CONFIG SET maxmemory 0 ;;
        busy) cli SCRIPT KILL ;;
        password) cli -a changed CONFIG SET requirepass '' ;;
        replica) cli REPLICAOF NO ONE ;;
        *) ;;
    esac
}

# Seconds until both gateways decide by the store again, 20 at most.
way_back() {
    local started gateway admin
    started=$(now)
    for gateway in "${GATEWAYS[@]}"; do
        admin=${gateway#* }
        admin=${admin%% *}
        for _ in $(seq 1000); do
            curl -s "http://127.0.0.1:$admin/api/v1/status" | grep -q '"up":true' && break
            sleep 0.02
        done
    done
    since "$started"
}

one_fault() {
    local fault=$1 started back took gateway
    GATEWAYS=()
    rm -f "$WORK/dump.rdb" "$WORK"/*.[12]
    redis_start
    gateway_start one
    gateway_start two
    sleep 1.5 # both have heard of each other
    started=$(now)
    load before $BEFORE
    wait "${LOADS[@]}"
    load during "$DURING"
    break_redis "$fault"
    wait "${LOADS[@]}"
    load after $AFTER
    heal_redis "$fault"
    back=$(way_back)
    wait "${LOADS[@]}"
    took=$(since "$started")
    grep -h ^RESULT "$WORK"/*.[12] | awk -v fault="$fault" -v back="$back" -v took="$took" -v c=$CAPACITY -v r=$RATE \
        -v b="$(worst before)" -v d="$(worst during)" -v a="$(worst after)" '
        { ok += $3; refused += $4; other += $5; sockets += $6; admitted += $10 }
        END { ideal = c + r * took
              printf "| %s | %d | %d | %d | %s | %s | %s | %d / %d | %s |\n",
                  fault, ok + refused + other, other, sockets, b, d, a, admitted, ideal, back }'
    for gateway in "${GATEWAYS[@]}"; do kill -9 "${gateway##* }" 2>/dev/null || true; done
    kill -CONT "$REDIS_PID" 2>/dev/null || true
    kill -9 "$REDIS_PID" 2>/dev/null || true
    while kill -0 "$REDIS_PID" 2>/dev/null; do sleep 0.02; done
}

# The worse p99 and maximum of the two gateways in a phase.
worst() {
    grep -h ^RESULT "$WORK/$1".[12] | awk '{ if ($8 > p) p = $8; if ($9 > m) m = $9 } END { printf "%.1f (%.0f)", p, m }'
}

free_port
REDIS_PORT=$REPLY
nginx_start
echo "Two gateways, capacity $CAPACITY, $RATE/s, ${BEFORE} s before, ${DURING} s of fault, ${AFTER} s after; times in ms: p99 (maximum)."
echo
echo '| fault | requests | not 200 or 429 | socket errors | before | during | after | admitted / ideal | s to recover |'
echo '|---|--:|--:|--:|--:|--:|--:|--:|--:|'
for fault in $FAULTS; do
    one_fault "$fault"
done
