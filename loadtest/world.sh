# shellcheck shell=bash
# What the load tests share: sourced by them, after HERE and TOLLGATE are set. Everything that is started here is
# on loopback, has its files in a temporary folder, and is ended with the script.

PATH=$PATH:/usr/local/sbin:/usr/sbin
export LC_ALL=C
WORK=$(mktemp -d)
PIDS=()
PORTS=()
ADMINS=()

finish() {
    local pid
    # The pattern also ends what was stopped.
    for pid in "${PIDS[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    rm -rf "$WORK"
}
trap finish EXIT

# Fails unless all of these can be run, and the gateway can.
need() {
    need_tools "$@"
    [ -x "$TOLLGATE" ] || { echo "no gateway at $TOLLGATE: cargo build --release" >&2; exit 1; }
}

need_tools() {
    local tool
    for tool in "$@"; do
        command -v "$tool" >/dev/null || { echo "missing: $tool" >&2; exit 1; }
    done
}

# A port that nobody listens on, into REPLY.
NEXT_PORT=$((20000 + $$ % 10000))
free_port() {
    while (exec 3<>"/dev/tcp/127.0.0.1/$NEXT_PORT") 2>/dev/null; do NEXT_PORT=$((NEXT_PORT + 1)); done
    REPLY=$NEXT_PORT
    NEXT_PORT=$((NEXT_PORT + 1))
}

# Starts a process in the background, to be ended with the script; its id into STARTED.
start() {
    "$@" >>"$WORK/log" 2>&1 &
    STARTED=$!
    disown "$STARTED" # killed on purpose: the shell need not tell
    PIDS+=("$STARTED")
}

# An upstream that answers 200 at once, at UPSTREAM. It logs the time and the key of each request into UPSTREAM_LOG,
# if that is set.
upstream_start() {
    local log="access_log off;"
    [ -z "${UPSTREAM_LOG:-}" ] || log="log_format at '\$msec \$http_x_api_key'; access_log $UPSTREAM_LOG at;"
    free_port
    UPSTREAM=$REPLY
    cat >"$WORK/nginx.conf" <<CONF
master_process off; daemon off; pid $WORK/nginx.pid; error_log /dev/null;
events { worker_connections 1024; }
http { $log keepalive_requests 1000000;
  server { listen 127.0.0.1:$UPSTREAM; location / { return 200 "hello\n"; } } }
CONF
    start nginx -c "$WORK/nginx.conf"
}

# A Redis at REDIS_PORT, of the program in REDIS, with the arguments in REDIS_ARGUMENTS, if these are set.
redis_start() {
    [ -n "${REDIS_PORT:-}" ] || { free_port; REDIS_PORT=$REPLY; }
    start "${REDIS:-redis-server}" --port "$REDIS_PORT" --bind 127.0.0.1 --save '' --appendonly no --dir "$WORK" \
        ${REDIS_ARGUMENTS[@]+"${REDIS_ARGUMENTS[@]}"}
    until timeout 5 redis-cli -p "$REDIS_PORT" PING >/dev/null 2>&1; do sleep 0.02; done
}

# A gateway on that Redis: its ports are added to PORTS and ADMINS. The arguments are what stands under `rules:` and
# the top of the file, what stands under `store.redis:`, and the routes, if it is not one for all paths.
gateway_start() {
    local rules=$1 redis=${2:-timeout: 50ms} routes=${3:-} port admin
    [ -n "$routes" ] || routes='  - {id: all, match: {path: /*}, upstream: u}'
    free_port; port=$REPLY
    free_port; admin=$REPLY
    cat >"$WORK/$port.yaml" <<YAML
threads: ${THREADS:-1}
listeners: [{address: 127.0.0.1:$port}]
admin: {address: 127.0.0.1:$admin}
store: {redis: {url: redis://127.0.0.1:$REDIS_PORT, $redis}}
upstreams: {u: {servers: [127.0.0.1:$UPSTREAM]}}
routes:
$routes
log: {level: error}
$rules
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
