#!/usr/bin/env bash
#
# How true the limit is: one key on 1 to 8 gateways, offered 0.5 to 10 times its rate; what was admitted of what could have
# been, and how full the fullest window was. When what was admitted is told by the upstream's own log.
# Prints a Markdown table; with SVG set, a picture into that file.
# Everything is on loopback, bounded in time, and ended by the script itself. Takes about five minutes.
#
# Environment: TOLLGATE  gateway binary (default: target/release/tollgate)
#              GATEWAYS  numbers of gateways, by word (default: 1 2 4 8)
#              OFFERED   multiples of the rate, by word (default: 0.5 0.95 1 2 5 10)
#              RATE      capacity and tokens per second (default: 500)
#              SECONDS_OF_LOAD (default: 6)
#              SVG       where the picture goes (default: none)
# Needs wrk, nginx, redis-server, redis-cli, curl.

set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
TOLLGATE=${TOLLGATE:-$(dirname -- "$HERE")/target/release/tollgate}
readonly GATEWAYS=${GATEWAYS:-1 2 4 8} OFFERED=${OFFERED:-0.5 0.95 1 2 5 10}
readonly RATE=${RATE:-500} SECONDS_OF_LOAD=${SECONDS_OF_LOAD:-6} EPSILON=0.05
# Of all gateways together: few enough that two cores keep the pace.
readonly CONNECTIONS=80
# shellcheck source=loadtest/world.sh
. "$HERE/world.sh"
need wrk nginx redis-server redis-cli curl

# One run on the gateways that there are: a line of gateways, offered, asked, admitted, ideal, fullest window
# beyond the capacity, calls of Redis, and answers that should not be.
one_run() { # key, times the rate
    local key=$1 times=$2 port loads=() calls
    local each=$((CONNECTIONS / ${#PORTS[@]}))
    local pause
    pause=$(awk -v c=$((each * ${#PORTS[@]})) -v rate="$RATE" -v times="$times" 'BEGIN { printf "%.0f", 1000 * c / (rate * times) }')
    calls=$(metric '^tollgate_store_calls_total ')
    : >"$UPSTREAM_LOG"
    for port in "${PORTS[@]}"; do
        timeout $((SECONDS_OF_LOAD + 10)) wrk -t1 -c"$each" "-d${SECONDS_OF_LOAD}s" -s "$HERE/wrk-paced.lua" \
            "http://127.0.0.1:$port/" -- "$key" "$pause" >"$WORK/load.$port" 2>&1 &
        loads+=($!)
    done
    wait "${loads[@]}"
    calls=$(($(metric '^tollgate_store_calls_total ') - calls))
    sleep 0.3
    sort -n "$UPSTREAM_LOG" | awk -v rate="$RATE" -v calls="$calls" -v gateways="${#PORTS[@]}" -v times="$times" -v seconds="$SECONDS_OF_LOAD" \
        -v asked="$(cat "$WORK"/load.* | awk '$1 == "RESULT" { n += $2; other += $4 + $5 } END { print n, other }')" '
        {
            if (NR == 1) level = 0; else level -= rate * ($1 - at)
            if (level < 0) level = 0
            level += 1; at = $1
            if (level > fullest) fullest = level
        }
        END {
            split(asked, a, " ")
            could = rate + rate * seconds
            ideal = a[1] < could ? a[1] : could
            print gateways, times, a[1], NR, ideal, fullest - rate, calls, a[2]
        }'
    rm -f "$WORK"/load.*
}

# A line for each number of gateways over what was offered.
picture() {
    awk -v offered="$OFFERED" -v epsilon="$EPSILON" '
        { share[$1, $2] = $4 / $5 * 100; if (!($1 in seen)) { seen[$1] = 1; order[++lines] = $1 } }
        function x(i) { return 70 + (i - 1) * 500 / (n - 1) }
        function y(p) { return 40 + (106 - p) * 220 / 16 }
        END {
            n = split(offered, times, " ")
            split("#1b6ca8 #c8553d #588157 #7b2d8b #b08900 #444444", colour, " ")
            print "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 640 340\" font-family=\"sans-serif\" font-size=\"12\">"
            print "<rect width=\"640\" height=\"340\" fill=\"white\"/>"
            print "<text x=\"70\" y=\"22\" font-size=\"14\">Admitted, in per cent of what could have been</text>"
            for (p = 90; p <= 106; p += 2) {
                printf "<line x1=\"70\" x2=\"570\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>", y(p), y(p), p == 100 ? "#888" : "#e4e4e4"
                printf "<text x=\"62\" y=\"%.1f\" text-anchor=\"end\">%d</text>\n", y(p) + 4, p
            }
            printf "<line x1=\"70\" x2=\"570\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#c00\" stroke-dasharray=\"4 4\"/>", y(100 + epsilon * 100), y(100 + epsilon * 100)
            printf "<text x=\"575\" y=\"%.1f\" fill=\"#c00\">slack</text>\n", y(100 + epsilon * 100) + 4
            for (i = 1; i <= n; i++) printf "<text x=\"%.1f\" y=\"278\" text-anchor=\"middle\">%s</text>\n", x(i), times[i]
            print "<text x=\"320\" y=\"298\" text-anchor=\"middle\">offered, in multiples of the rate</text>"
            for (l = 1; l <= lines; l++) {
                points = ""
                for (i = 1; i <= n; i++) points = points sprintf("%.1f,%.1f ", x(i), y(share[order[l], times[i]]))
                printf "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" points=\"%s\"/>\n", colour[l], points
                printf "<line x1=\"%d\" x2=\"%d\" y1=\"318\" y2=\"318\" stroke=\"%s\" stroke-width=\"3\"/>", 70 + (l - 1) * 125, 90 + (l - 1) * 125, colour[l]
                printf "<text x=\"%d\" y=\"322\">%d gateway%s</text>\n", 96 + (l - 1) * 125, order[l], order[l] == 1 ? "" : "s"
            }
            print "</svg>"
        }' "$WORK/results"
}

UPSTREAM_LOG=$WORK/admitted
upstream_start
redis_start
for count in $GATEWAYS; do
    while [ "${#PORTS[@]}" -lt "$count" ]; do
        gateway_start "rules: {default: {capacity: $RATE, refill_per_second: $RATE}}
hot_keys: {epsilon: $EPSILON}"
    done
    sleep 5 # until each may hold something: all others have counted it
    for times in $OFFERED; do
        one_run "key-$count-$times" "$times" >>"$WORK/results"
        tail -1 "$WORK/results" >&2
    done
done

[ -z "${SVG:-}" ] || picture >"$SVG"
awk -v rate="$RATE" -v epsilon="$EPSILON" '
    BEGIN {
        print "| gateways | offered | asked | admitted | of the ideal | fullest window | calls of Redis per request |"
        print "|--:|--:|--:|--:|--:|--:|--:|"
    }
    {
        printf "| %d | %s | %d | %d | %.1f %% | %+d | %.3f |\n", $1, $2, $3, $4, $4 / $5 * 100, $6, $7 / $3
        if ($6 > epsilon * rate + 1 || $8 > 0) bad = bad sprintf("%d gateways, %s: %d beyond the capacity, %d wrong answers\n", $1, $2, $6, $8)
    }
    END { if (bad) { printf "%s", bad > "/dev/stderr"; exit 1 } }' "$WORK/results"
