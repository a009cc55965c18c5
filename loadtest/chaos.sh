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

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
TOLLGATE=${TOLLGATE:-$(dirname -- "$HERE")/target/release/tollgate}
FAULTS=${FAULTS:-none kill kill-saved stop pause sleep drop oom flush busy password replica}
readonly CAPACITY=200 RATE=100 BEFORE=2 DURING=${DURING:-3} AFTER=3

# shellcheck source=loadtest/world.sh
. "$HERE/world.sh"
need wrk nginx redis-server redis-cli curl
REDIS_ARGUMENTS=(--enable-debug-command yes --busy-reply-threshold 100)

DROPPED=''
undrop_and_finish() {
    [ -z "$DROPPED" ] || drop_rules -D
    finish
}
trap undrop_and_finish EXIT

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }
cli() { timeout 5 redis-cli -p "$REDIS_PORT" "$@" >/dev/null 2>&1; }

# One phase of load on both gateways: its results into $WORK/PHASE.N
load() {
    local phase=$1 seconds=$2 n=0 port
    LOADS=()
    for port in "${PORTS[@]}"; do
        n=$((n + 1))
        timeout $((seconds + 10)) wrk -t1 -c4 "-d${seconds}s" -s "$HERE/wrk-status.lua" \
            "http://127.0.0.1:$port/" >"$WORK/$phase.$n" 2>&1 &
        LOADS+=($!)
    done
}

redis_again() {
    redis_start
    REDIS_PID=$STARTED
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
        kill | kill-saved) redis_again ;;
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
    local started admin
    started=$(now)
    for admin in "${ADMINS[@]}"; do
        for _ in $(seq 1000); do
            curl -s "http://127.0.0.1:$admin/api/v1/status" | grep -q '"kind":"redis","up":true' && break
            sleep 0.02
        done
    done
    since "$started"
}

one_fault() {
    local fault=$1 started back took pid
    PORTS=() ADMINS=() GATEWAYS=()
    rm -f "$WORK/dump.rdb" "$WORK"/*.[12]
    redis_again
    for _ in 1 2; do
        gateway_start "rules:
  rows:
    - {tenant: open, capacity: 1000000000, refill_per_second: 1000000000}
    - {tenant: limited, capacity: $CAPACITY, refill_per_second: $RATE}" "timeout: 5ms"
        GATEWAYS+=("$STARTED")
    done
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
    for pid in "${GATEWAYS[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    kill -CONT "$REDIS_PID" 2>/dev/null || true
    kill -9 "$REDIS_PID" 2>/dev/null || true
    while kill -0 "$REDIS_PID" 2>/dev/null; do sleep 0.02; done
}

# The worse p99 and maximum of the two gateways in a phase.
worst() {
    grep -h ^RESULT "$WORK/$1".[12] | awk '{ if ($8 > p) p = $8; if ($9 > m) m = $9 } END { printf "%.1f (%.0f)", p, m }'
}

upstream_start
echo "Two gateways, capacity $CAPACITY, $RATE/s, ${BEFORE} s before, ${DURING} s of fault, ${AFTER} s after; times in ms: p99 (maximum)."
echo
echo '| fault | requests | not 200 or 429 | socket errors | before | during | after | admitted / ideal | s to recover |'
echo '|---|--:|--:|--:|--:|--:|--:|--:|--:|'
for fault in $FAULTS; do
    one_fault "$fault"
done
