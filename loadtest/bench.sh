#!/usr/bin/env bash
#
# Compare the gateway with itself: the same binary without limits, with limits
# in memory and with limits in Redis, in paired rounds on one machine.
# See README.md in this directory, or run with -h.

set -euo pipefail

# Debian puts nginx in a directory that is often not in a normal user's PATH.
PATH=$PATH:/usr/local/sbin:/usr/sbin
# A comma as decimal point would break the arithmetic and the table.
export LC_ALL=C

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname -- "$HERE")
readonly HERE ROOT

ROUNDS=${ROUNDS:-8}
SLICE=${SLICE:-3}
CONNECTIONS=${CONNECTIONS:-64}
KEYS=${KEYS:-1000}
ARMS=${ARMS:-plain memory redis}
THREADS=${THREADS:-1}
QUIET=${QUIET:-30}

readonly START_LIMIT=10  # seconds a server may take to become ready
readonly STOP_LIMIT=3    # seconds a process may take to stop when asked
readonly WRK_GRACE=15    # seconds wrk may take on top of its slice

CLK_TCK=$(getconf CLK_TCK)
readonly CLK_TCK

WORK=''            # temporary directory; holds everything the run writes
PIDS=()            # servers started here; nothing else is ever killed
WRK_PID=''         # load tool, while it runs
REPLY=''           # result of functions that must not run in a subshell
TAKEN_PORTS=' '    # ports already given out in this run
ARM_LIST=()        # ARMS as a list
NGINX_PORT=''
REDIS_PORT=''
REDIS_PID=''
QUIET_STATE='not checked'
declare -A GATEWAY_PORT GATEWAY_PID

# ------------------------------------------------------------ messages -----

usage() {
    cat <<'TEXT'
Usage: bench.sh [-h]

Measures the gateway in several configurations ("arms") in paired rounds and
prints a Markdown table to stdout. Progress and warnings go to stderr.

Arms:
  plain    no limits (tenant_rule: "off"); the others are compared with it
  memory   limits kept in memory
  redis    limits kept in a redis-server that the script starts

Environment:
  TOLLGATE     gateway binary (default: target/release/tollgate, built when
               it is missing)
  ROUNDS       number of rounds                            (default 8)
  SLICE        seconds of load per arm and round           (default 3)
  CONNECTIONS  connections wrk keeps open                  (default 64)
  KEYS         number of different X-Api-Key values        (default 1000)
  ARMS         arms to run              (default "plain memory redis")
  THREADS      worker threads of the gateway               (default 1)
  QUIET        seconds to wait for a quiet machine, 0: do not wait
                                                           (default 30)

Needs Linux and wrk, nginx; for the redis arm also redis-server, redis-cli.
TEXT
}

say() { printf '%s\n' "$*" >&2; }

warn() { printf '\n!!! WARNING: %s\n\n' "$*" >&2; }

die() {
    printf 'bench.sh: %s\n' "$*" >&2
    exit 1
}

# The temporary directory is removed on exit, so show the end of the log now.
die_with_log() {
    local log=$1
    shift
    say "--- last lines of $(basename -- "$log") ---"
    tail -n 20 -- "$log" >&2 || true
    die "$*"
}

# -------------------------------------------------------------- checks -----

require_integer() {
    local name=$1 least=$2 value=${!1}
    # At most nine digits, and no leading zero, which bash would read as octal.
    if ! [[ $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < least)); then
        die "$name must be a whole number of at least $least, not '$value'"
    fi
}

check_options() {
    require_integer ROUNDS 1
    require_integer SLICE 1
    require_integer CONNECTIONS 1
    require_integer KEYS 1
    require_integer THREADS 1
    require_integer QUIET 0

    local arm seen=' '
    read -ra ARM_LIST <<<"$ARMS"
    ((${#ARM_LIST[@]} > 0)) || die 'ARMS is empty'
    for arm in "${ARM_LIST[@]}"; do
        case $arm in
            plain | memory | redis) ;;
            *) die "unknown arm '$arm' in ARMS; known are: plain memory redis" ;;
        esac
        [[ $seen != *" $arm "* ]] || die "arm '$arm' appears twice in ARMS"
        seen+="$arm "
    done
}

has_arm() { [[ " ${ARM_LIST[*]} " == *" $1 "* ]]; }

check_tools() {
    local tool missing=()
    local needed=(wrk nginx)
    if has_arm redis; then
        needed+=(redis-server redis-cli)
    fi
    for tool in "${needed[@]}"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    if ((${#missing[@]} > 0)); then
        die "not found: ${missing[*]} (on Debian or Ubuntu: apt-get install wrk nginx redis-server)"
    fi
    [[ -r /proc/self/stat ]] || die 'needs Linux: CPU time is read from /proc'
}

# A path the caller chose is never built: the caller meant that very file.
find_gateway() {
    if [[ -n ${TOLLGATE:-} ]]; then
        [[ -f $TOLLGATE && -x $TOLLGATE ]] || die "TOLLGATE=$TOLLGATE is not an executable file"
        # Without a slash in it, the name would be searched for in PATH.
        TOLLGATE=$(realpath -- "$TOLLGATE")
        return
    fi
    TOLLGATE=$ROOT/target/release/tollgate
    [[ -x $TOLLGATE ]] && return
    command -v cargo >/dev/null || die "$TOLLGATE is missing and cargo was not found"
    say 'building the release binary'
    (cd -- "$ROOT" && cargo build --release --locked >&2) || die 'cargo build failed'
    [[ -x $TOLLGATE ]] || die "the build did not produce $TOLLGATE; set TOLLGATE"
}

# ----------------------------------------------------------- processes -----

# Fields of /proc/PID/stat from the third on, in REPLY. The second one is the
# program's name, which may hold spaces and brackets: cut after the last one.
read_stat() {
    local line
    # The process may be gone; the error of the redirection is of no interest.
    { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    REPLY=${line##*) }
}

# True while PID is a running child of this script. Asking for the parent makes
# sure that a process which got a recycled PID is never killed.
is_ours() {
    local state parent _
    read_stat "$1" || return 1
    read -r state parent _ <<<"$REPLY"
    [[ $parent == "$$" && $state != Z ]]
}

signal_ours() {
    local signal=$1 pid
    shift
    for pid in "$@"; do
        if is_ours "$pid"; then
            kill -s "$signal" "$pid" 2>/dev/null || true
        fi
    done
}

any_ours() {
    local pid
    for pid in "$@"; do
        is_ours "$pid" && return 0
    done
    return 1
}

# A gateway that is asked to stop may wait a long time for its open
# connections. Nothing here is worth waiting for, so be patient only briefly.
cleanup() {
    local status=$? all=() deadline=$((SECONDS + STOP_LIMIT))
    trap - EXIT
    trap '' INT TERM HUP
    set +e
    [[ -z $WRK_PID ]] || all+=("$WRK_PID")
    all+=("${PIDS[@]}")
    signal_ours TERM "${all[@]}"
    while any_ours "${all[@]}" && ((SECONDS < deadline)); do
        sleep 0.1
    done
    signal_ours KILL "${all[@]}"
    wait 2>/dev/null
    [[ -z $WORK ]] || rm -rf -- "$WORK"
    exit "$status"
}

install_traps() {
    trap cleanup EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

# start LOG COMMAND...: run in the background; the PID is in REPLY. There is no
# wrapper around the command, so that the PID is that of the server itself.
start() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 </dev/null &
    REPLY=$!
    PIDS+=("$REPLY")
}

# wait_ready NAME PID LOG COMMAND...: until COMMAND succeeds.
wait_ready() {
    local name=$1 pid=$2 log=$3 deadline=$((SECONDS + START_LIMIT))
    shift 3
    until "$@"; do
        is_ours "$pid" || die_with_log "$log" "$name stopped while starting"
        ((SECONDS < deadline)) || die_with_log "$log" "$name was not ready within $START_LIMIT s"
        sleep 0.1
    done
    # Another program may have taken the port and given the answer.
    is_ours "$pid" || die_with_log "$log" "$name stopped while starting"
}

# ------------------------------------------------------------- network -----

port_in_use() (
    exec 3<>"/dev/tcp/127.0.0.1/$1"
) 2>/dev/null

# A free port, in REPLY. The range lies below the one Linux takes the ports of
# outgoing connections from, so that wrk cannot occupy a port just picked.
pick_port() {
    local try port
    for ((try = 0; try < 200; try++)); do
        port=$((12000 + RANDOM % 20000))
        if [[ $TAKEN_PORTS != *" $port "* ]] && ! port_in_use "$port"; then
            TAKEN_PORTS+="$port "
            REPLY=$port
            return
        fi
    done
    die 'found no free port'
}

# http_ok PORT PATH: does GET answer 200? Done in bash to need no further tool.
http_ok() (
    exec 3<>"/dev/tcp/127.0.0.1/$1" || exit 1
    printf 'GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n' "$2" >&3
    read -r -t 1 _ status _ <&3 || exit 1
    [[ $status == 200 ]]
) 2>/dev/null

# ------------------------------------------------------------- servers -----

# The upstream must never be the bottleneck nor close a pooled connection
# during the run, hence the high limits.
start_nginx() {
    pick_port
    NGINX_PORT=$REPLY
    mkdir -- "$WORK/nginx"
    cat >"$WORK/nginx/nginx.conf" <<CONF
daemon off;
pid nginx.pid;
worker_processes 1;
events { worker_connections $((CONNECTIONS * 8 + 512)); }
http {
    access_log off;
    default_type text/plain;
    keepalive_requests 1000000000;
    keepalive_timeout 3600s;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {
        listen 127.0.0.1:$NGINX_PORT backlog=1024;
        location / { return 200 "hello\n"; }
    }
}
CONF
    start "$WORK/nginx.log" nginx -e stderr -p "$WORK/nginx/" -c "$WORK/nginx/nginx.conf"
    wait_ready nginx "$REPLY" "$WORK/nginx.log" http_ok "$NGINX_PORT" /
}

# A hanging redis-cli must not hang the run.
redis() { timeout 5 redis-cli -h 127.0.0.1 -p "$REDIS_PORT" "$@"; }

redis_answers() { [[ $(redis ping 2>/dev/null) == PONG ]]; }

start_redis() {
    pick_port
    REDIS_PORT=$REPLY
    mkdir -- "$WORK/redis"
    start "$WORK/redis.log" redis-server --bind 127.0.0.1 --port "$REDIS_PORT" \
        --dir "$WORK/redis" --save '' --appendonly no --daemonize no
    REDIS_PID=$REPLY
    wait_ready redis-server "$REDIS_PID" "$WORK/redis.log" redis_answers
}

# write_config ARM PORT ADMIN_PORT: the arms differ in as little as possible.
write_config() {
    local arm=$1 port=$2 admin_port=$3 store=memory tenant_rule=''
    case $arm in
        plain) tenant_rule=', tenant_rule: "off"' ;;
        redis) store="{redis: {url: \"redis://127.0.0.1:$REDIS_PORT\", timeout: 1s}}" ;;
    esac
    # The rule is far above any rate this can reach: the work of limiting is
    # measured, not the cheap path of refusing.
    cat >"$WORK/$arm.yaml" <<CONF
threads: $THREADS
listeners: [{address: "127.0.0.1:$port"}]
admin: {address: "127.0.0.1:$admin_port"}
store: $store
upstreams: {origin: {servers: ["127.0.0.1:$NGINX_PORT"]}}
routes:
  - {id: bench, match: {path: "/*"}, upstream: origin$tenant_rule}
rules: {default: {capacity: 1000000, refill_per_second: 1000000}}
headers: [x-ratelimit]
log: {level: warn}
CONF
}

start_gateway() {
    local arm=$1 port admin_port
    pick_port
    port=$REPLY
    pick_port
    admin_port=$REPLY
    write_config "$arm" "$port" "$admin_port"
    start "$WORK/$arm.log" "$TOLLGATE" serve --config "$WORK/$arm.yaml"
    GATEWAY_PORT[$arm]=$port
    GATEWAY_PID[$arm]=$REPLY
    wait_ready "gateway ($arm)" "$REPLY" "$WORK/$arm.log" http_ok "$admin_port" /readyz
}

# All gateways stay up for the whole run. Idle ones cost nothing, and no slice
# then pays for a cold start.
start_servers() {
    local arm
    say 'starting the servers'
    start_nginx
    if has_arm redis; then
        start_redis
    fi
    for arm in "${ARM_LIST[@]}"; do
        start_gateway "$arm"
    done
}

# ----------------------------------------------------------- measuring -----

# User and system time of a whole process in clock ticks, in REPLY.
read_cpu() {
    local fields
    read_stat "$1" || die "process $1 stopped during the run"
    read -ra fields <<<"$REPLY"
    REPLY=$((fields[11] + fields[12])) # fields 14 and 15 of the file
}

# Number of EVALSHA calls so far, in REPLY.
read_evalsha() {
    REPLY=$(redis info commandstats | awk -F '[=,]' '
        /^cmdstat_evalsha:/ { calls = $2 }
        END { print calls + 0 }') || die 'redis-cli INFO failed'
}

# run_wrk ARM SECONDS: the line printed by wrk-keys.lua, in REPLY. wrk runs in
# the background because bash handles a signal during wait, but not before a
# foreground command has ended.
run_wrk() {
    local arm=$1 seconds=$2 log=$WORK/wrk.log status=0
    timeout -k 2 $((seconds + WRK_GRACE)) \
        wrk -t1 -c"$CONNECTIONS" -d"${seconds}s" -s "$HERE/wrk-keys.lua" \
        "http://127.0.0.1:${GATEWAY_PORT[$arm]}/" -- "$KEYS" >"$log" 2>&1 </dev/null &
    WRK_PID=$!
    wait "$WRK_PID" || status=$?
    WRK_PID=''
    ((status == 0)) || die_with_log "$log" "wrk failed on arm $arm (status $status)"
    REPLY=$(awk '$1 == "RESULT"' "$log")
    [[ -n $REPLY ]] || die_with_log "$log" "wrk printed no result on arm $arm"
}

# warn_errors ARM WHEN REQUESTS BAD_STATUS SOCKET_ERRORS EVALSHA
warn_errors() {
    local arm=$1 when=$2 requests=$3 bad_status=$4 socket_errors=$5 evalsha=$6
    ((requests > 0)) || die_with_log "$WORK/$arm.log" "no request was answered on arm $arm, $when"
    if ((bad_status > 0)); then
        warn "arm $arm, $when: $bad_status of $requests responses were not 2xx"
    fi
    if ((socket_errors > 0)); then
        warn "arm $arm, $when: $socket_errors socket errors or timeouts"
    fi
    if [[ $arm == redis ]] && ((evalsha == 0)); then
        warn "arm redis, $when: not a single EVALSHA reached Redis"
    fi
}

# measure ARM WHEN: put one slice of load on ARM; REPLY holds, separated by
# tabs: duration (us), requests, p50, p99, p99.9 (us), bad statuses, socket
# errors, gateway ticks, Redis ticks, EVALSHA calls.
measure() {
    local arm=$1 when=$2 pid=${GATEWAY_PID[$1]}
    local cpu redis_cpu=0 evalsha=0 result
    local duration requests p50 p99 p999 bad_status socket_errors

    is_ours "$pid" || die_with_log "$WORK/$arm.log" "gateway ($arm) is not running any more"
    if [[ $arm == redis ]]; then
        read_evalsha
        evalsha=$REPLY
        read_cpu "$REDIS_PID"
        redis_cpu=$REPLY
    fi
    read_cpu "$pid"
    cpu=$REPLY

    run_wrk "$arm" "$SLICE"
    result=$REPLY

    is_ours "$pid" || die_with_log "$WORK/$arm.log" "gateway ($arm) stopped under load"
    read_cpu "$pid"
    cpu=$((REPLY - cpu))
    if [[ $arm == redis ]]; then
        read_cpu "$REDIS_PID"
        redis_cpu=$((REPLY - redis_cpu))
        read_evalsha
        evalsha=$((REPLY - evalsha))
    fi

    IFS=$'\t' read -r _ duration requests p50 p99 p999 bad_status socket_errors <<<"$result"
    warn_errors "$arm" "$when" "$requests" "$bad_status" "$socket_errors" "$evalsha"
    printf -v REPLY '%s\t' "$duration" "$requests" "$p50" "$p99" "$p999" \
        "$bad_status" "$socket_errors" "$cpu" "$redis_cpu" "$evalsha"
    REPLY=${REPLY%$'\t'}
}

# Fills connection pools and caches, creates the buckets, and finds a broken
# setup before any time is spent on measuring.
warm_up() {
    local arm
    for arm in "${ARM_LIST[@]}"; do
        say "warm-up: $arm"
        measure "$arm" warm-up
    done
}

# Total and idle ticks of all cores. Waiting for a disk is idle; guest time
# (fields 10 and 11) is already part of user time.
cpu_totals() {
    awk '/^cpu / { for (i = 2; i <= 9; i++) total += $i; print total, $5 + $6 }' /proc/stat
}

# Busy share of the machine over one second in per cent, in REPLY.
read_busy() {
    local before after
    before=$(cpu_totals)
    sleep 1
    after=$(cpu_totals)
    REPLY=$(awk -v before="$before" -v after="$after" 'BEGIN {
        split(before, b); split(after, a)
        total = a[1] - b[1]
        if (total < 1) total = 1
        printf "%.0f", 100 * (1 - (a[2] - b[2]) / total)
    }')
}

# The load average lags by a minute, so look at what the cores do right now.
# A busy machine is reported, not refused: paired rounds cope with some noise.
wait_quiet() {
    local deadline=$((SECONDS + QUIET))
    if ((QUIET == 0)); then
        return
    fi
    while true; do
        read_busy
        if ((REPLY < 20)); then
            QUIET_STATE="yes ($REPLY % busy)"
            break
        elif ((SECONDS >= deadline)); then
            QUIET_STATE="NO ($REPLY % busy after waiting $QUIET s)"
            break
        fi
    done
    say "machine quiet before measuring: $QUIET_STATE"
}

# The order is random in each round, so that no arm always runs after the same
# one and a slow drift of the machine does not favour any of them.
run_rounds() {
    local round arm order
    for ((round = 1; round <= ROUNDS; round++)); do
        mapfile -t order < <(shuf -e -- "${ARM_LIST[@]}")
        for arm in "${order[@]}"; do
            measure "$arm" "round $round"
            printf '%s\t%s\t%s\n' "$round" "$arm" "$REPLY" >>"$WORK/rows.tsv"
            awk -F '\t' -v rounds="$ROUNDS" -v hz="$CLK_TCK" 'END {
                printf "round %d/%d  %-6s  %8.0f req/s  %.3f CPU s per 100k\n",
                    $1, rounds, $2, $4 / ($3 / 1e6), $10 / hz / $4 * 1e5
            }' "$WORK/rows.tsv" >&2
        done
    done
}

# ----------------------------------------------------------- reporting -----

load_average() { cut -d ' ' -f 1-3 /proc/loadavg; }

print_header() {
    local load_before=$1
    cat <<TEXT
Cores: $(getconf _NPROCESSORS_ONLN); rounds: $ROUNDS; slice: $SLICE s; connections: $CONNECTIONS; keys: $KEYS; gateway threads: $THREADS.
Load average before: $load_before; after: $(load_average). Machine quiet before measuring: $QUIET_STATE.

TEXT
}

# The ratios are taken within each round, between slices that ran seconds
# apart, and only then summed up: that is what makes the rounds "paired".
print_table() {
    awk -F '\t' -v arms="${ARM_LIST[*]}" -v rounds="$ROUNDS" -v hz="$CLK_TCK" '
        # Not every awk has a sort function.
        function sort(list, n,    i, j, value) {
            for (i = 2; i <= n; i++) {
                value = list[i]
                for (j = i - 1; j >= 1 && list[j] > value; j--) list[j + 1] = list[j]
                list[j + 1] = value
            }
        }
        # Sorted values of one metric of one arm, over all rounds, in "list".
        function collect(metric, arm,    i) {
            for (i = 1; i <= rounds; i++) list[i] = data[metric, arm, i]
            sort(list, rounds)
        }
        function middle() {
            return rounds % 2 ? list[(rounds + 1) / 2] : (list[rounds / 2] + list[rounds / 2 + 1]) / 2
        }
        function median(metric, arm) {
            collect(metric, arm)
            return middle()
        }
        function ratio(metric, arm,    i) {
            if (arm == "plain") return "1"
            if (!has_plain) return "-"
            for (i = 1; i <= rounds; i++) {
                # A slice can be too short for the clock that counts CPU time.
                if (data[metric, "plain", i] == 0) return "-"
                list[i] = data[metric, arm, i] / data[metric, "plain", i]
            }
            sort(list, rounds)
            return sprintf("%.3f (%.3f..%.3f)", middle(), list[1], list[rounds])
        }
        function redis_only(format, metric, arm) {
            return arm == "redis" ? sprintf(format, median(metric, arm)) : "-"
        }
        function ms(metric, arm) { return sprintf("%.2f", median(metric, arm) / 1000) }

        {
            round = $1; arm = $2; requests = $4
            data["rate", arm, round] = requests / ($3 / 1e6)
            data["p50", arm, round] = $5
            data["p99", arm, round] = $6
            data["p999", arm, round] = $7
            data["cpu", arm, round] = $10 / hz / requests * 1e5
            data["redis_cpu", arm, round] = $11 / hz / requests * 1e5
            data["evalsha", arm, round] = $12 / requests
            bad_status[arm] += $8
            socket_errors[arm] += $9
            if (arm == "plain") has_plain = 1
        }

        END {
            print "| arm | req/s | p50 ms | p99 ms | p99.9 ms | gateway CPU s / 100k | Redis CPU s / 100k | EVALSHA / request | req/s : plain | gateway CPU : plain | non-2xx | socket errors |"
            print "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
            count = split(arms, order, " ")
            for (a = 1; a <= count; a++) {
                arm = order[a]
                printf "| %s | %.0f | %s | %s | %s | %.3f | %s | %s | %s | %s | %d | %d |\n",
                    arm, median("rate", arm), ms("p50", arm), ms("p99", arm), ms("p999", arm),
                    median("cpu", arm),
                    redis_only("%.3f", "redis_cpu", arm), redis_only("%.4f", "evalsha", arm),
                    ratio("rate", arm), ratio("cpu", arm), bad_status[arm], socket_errors[arm]
                if (bad_status[arm] + socket_errors[arm] > 0) errors = 1
                if (arm == "redis" && median("evalsha", arm) == 0) unused = 1
            }
            print ""
            print "Medians over the rounds. Ratios are taken within each round: median (min..max)."
            if (errors) print "\n**WARNING: there were errors; these numbers are not a valid comparison.**"
            if (unused) print "\n**WARNING: in most rounds the redis arm made no EVALSHA call; its numbers do not show the cost of Redis.**"
        }
    ' "$WORK/rows.tsv"
}

# ---------------------------------------------------------------- main -----

main() {
    local load_before
    case ${1:-} in
        '') ;;
        -h | --help)
            usage
            return
            ;;
        *)
            usage >&2
            exit 2
            ;;
    esac

    check_options
    check_tools
    find_gateway
    install_traps
    WORK=$(mktemp -d)

    load_before=$(load_average)
    start_servers
    warm_up
    wait_quiet
    run_rounds

    print_header "$load_before"
    print_table
}

main "$@"
