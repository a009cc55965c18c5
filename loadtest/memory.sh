#!/usr/bin/env bash
#
# What buckets cost in Redis: each of 100,000 tenants asks once on each of three routes, through a gateway; then
# once more, when what is left is no whole number any more; then nobody asks, until Redis is empty again.
# Everything is on loopback, bounded in time, and ended by the script itself.
#
# Environment: TOLLGATE  gateway binary (default: target/release/tollgate)
#              REDIS     redis-server binary (default: redis-server)
#              TENANTS   how many (default: 100000)
#              SECONDS_A_ROUND  for each to have asked once (default: 80)
# Needs wrk, nginx, redis-server, redis-cli, curl. Takes about eight minutes.

set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
TOLLGATE=${TOLLGATE:-$(dirname -- "$HERE")/target/release/tollgate}
readonly REDIS=${REDIS:-redis-server} TENANTS=${TENANTS:-100000} ROUTES=3 SECONDS_A_ROUND=${SECONDS_A_ROUND:-80}
# Full after 120 s; a key lives for twice as long, so that all are there when they are counted.
readonly CAPACITY=120 RATE=1 LIFE=240
# shellcheck source=loadtest/world.sh
. "$HERE/world.sh"
need wrk nginx redis-cli curl "$REDIS"

info() { redis-cli -p "$REDIS_PORT" INFO "$1" | tr -d '\r' | sed -n "s/^$2://p"; }
keys() { redis-cli -p "$REDIS_PORT" DBSIZE; }

upstream_start
redis_start
routes=$(for route in $(seq $ROUTES); do echo "  - {id: r$route, match: {path: /r$route}, upstream: u}"; done)
gateway_start "rules: {default: {capacity: $CAPACITY, refill_per_second: $RATE}}" "timeout: 50ms" "$routes"

before=$(info memory used_memory)
own=$(keys)
echo "$("$REDIS" --version | cut -d' ' -f1-3), $TENANTS tenants x $ROUTES routes"
for round in 1 2; do
    calls=$(info commandstats cmdstat_evalsha | sed 's/calls=\([0-9]*\),.*/\1/')
    told=$(wrk -t1 -c32 "-d${SECONDS_A_ROUND}s" -s "$HERE/wrk-each.lua" "http://127.0.0.1:${PORTS[0]}/" -- "$TENANTS" "$ROUTES" | grep RESULT)
    read -r _ asked other <<<"$told"
    [ "$asked" -ge $((TENANTS * ROUTES)) ] || { echo "only $asked have asked in $SECONDS_A_ROUND s" >&2; exit 1; }
    used=$(info memory used_memory) count=$(($(keys) - own))
    calls=$(($(info commandstats cmdstat_evalsha | sed 's/calls=\([0-9]*\),.*/\1/') - ${calls:-0}))
    echo "round $round: $asked asked, $other not 200; $count buckets, $(((used - before) / 1048576)) MiB," \
        "$(((used - before) / count)) bytes per bucket; $calls calls"
done
sleep $LIFE
for _ in $(seq 60); do
    left=$(($(keys) - own))
    [ "$left" -gt 0 ] || break
    sleep 1
done
echo "$LIFE s later and some: $left buckets"
