# shellcheck shell=bash disable=SC2034 # some of it is used by compare only
# How each peer is started: sourced by `compare`, after loadtest/world.sh. The files of a peer are in $WORK/NAME.

readonly MODULES=/usr/lib/nginx/modules
readonly CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/tollgate-peers
readonly ENVOY=$CACHE/envoy

readonly ALL_PEERS='tollgate-plain tollgate-memory tollgate-redis tollgate-default nginx-plain nginx-lua nginx-limit-req haproxy envoy'

declare -A PORT_OF PID_OF REDIS_OF REDIS_PID_OF

uses_redis() { [[ $1 == nginx-lua || $1 == tollgate-redis || $1 == tollgate-default ]]; }

# missing_for PEER: prints what is not there.
missing_for() {
    local file files=() program programs=()
    case $1 in
        tollgate-*) files=("$TOLLGATE") ;;
        nginx-lua) files=("$MODULES/ndk_http_module.so" "$MODULES/ngx_http_lua_module.so" "$CACHE/lua/nginx/redis.lua") ;;
        haproxy) programs=(haproxy) ;;
        envoy) files=("$ENVOY") ;;
    esac
    ! uses_redis "$1" || programs+=(redis-server redis-cli)
    for file in ${files[@]+"${files[@]}"}; do [[ -e $file ]] || echo "$file"; done
    for program in ${programs[@]+"${programs[@]}"}; do command -v "$program" >/dev/null || echo "$program"; done
}

# configure TEMPLATE FILE [NAME=VALUE...]: puts the values into the places @NAME@ of a template.
configure() {
    local template=$1 file=$2 pair
    local text
    text=$(<"$HERE/conf/$template")
    shift 2
    for pair in "PORT=$ADDRESS" "RATE=$RATE" "HERE=$HERE" "CACHE=$CACHE" "MODULES=$MODULES" \
        "KEPT_CONNECTIONS=$((CONNECTIONS * 2))" "MANY_CONNECTIONS=$((CONNECTIONS * 40 + 512))" \
        "UPSTREAM=${UPSTREAM:-}" "$@"; do
        text=${text//"@${pair%%=*}@"/"${pair#*=}"}
    done
    printf '%s\n' "$text" >"$file"
}

start_nginx() { # folder, template, [NAME=VALUE...]
    local folder=$WORK/$1 template=$2
    shift 2
    mkdir -p "$folder"
    configure "$template" "$folder/nginx.conf" "$@"
    start nginx -e stderr -p "$folder/" -c "$folder/nginx.conf"
}

start_tollgate() { # peer, what stands at `store:`, at the route, and at the top of the file
    free_port
    configure tollgate.yaml "$WORK/$1.yaml" "ADMIN=$REPLY" "STORE=$2" "TENANT_RULE=$3" "HOT_KEYS=$4"
    start "$TOLLGATE" serve --config "$WORK/$1.yaml"
}

start_envoy() {
    configure envoy.yaml "$WORK/envoy.yaml"
    start "$ENVOY" -c "$WORK/envoy.yaml" --concurrency 1 --disable-hot-restart --log-level error
}

start_haproxy() {
    configure haproxy.cfg "$WORK/haproxy.cfg"
    start haproxy -db -q -f "$WORK/haproxy.cfg"
}

# A Redis of its own for each peer that uses one: two Tollgates on one Redis would be a cluster and share the limits.
start_redis_of() {
    REDIS_PORT=''
    redis_start
    REDIS_OF[$1]=$REDIS_PORT
    REDIS_PID_OF[$1]=$STARTED
}

# A decision may take a second, with Tollgate and with nginx and Lua: on a full machine, no answer may come from elsewhere
# than Redis.
start_program() {
    local redis="{redis: {url: \"redis://127.0.0.1:${REDIS_PORT:-}\", timeout: 1s}}"
    case $1 in
        tollgate-plain) start_tollgate "$1" memory ', tenant_rule: "off"' '' ;;
        tollgate-memory) start_tollgate "$1" memory '' '' ;;
        tollgate-redis) start_tollgate "$1" "$redis" '' 'hot_keys: {epsilon: 0}' ;;
        tollgate-default) start_tollgate "$1" "$redis" '' '' ;;
        nginx-plain | nginx-limit-req) start_nginx "$1" "$1.conf" ;;
        nginx-lua) start_nginx "$1" "$1.conf" "REDIS=$REDIS_PORT" ;;
        haproxy) start_haproxy ;;
        envoy) start_envoy ;;
    esac
}

# start_peer PEER: fails unless it answers through the upstream.
start_peer() {
    : >"$WORK/log"
    ! uses_redis "$1" || start_redis_of "$1"
    free_port
    ADDRESS=$REPLY
    start_program "$1"
    PORT_OF[$1]=$ADDRESS
    PID_OF[$1]=$STARTED
    answers "$ADDRESS" "$STARTED"
}

start_upstream() {
    free_port
    ADDRESS=$REPLY
    start_nginx upstream upstream.conf
    UPSTREAM=$ADDRESS
    answers "$ADDRESS" "$STARTED"
}

# answers PORT PID: waits until the process answers 200, at most 10 s.
answers() {
    local deadline=$((SECONDS + 10))
    until curl -sfo /dev/null -m 2 -H 'X-Api-Key: first' "http://127.0.0.1:$1/"; do
        kill -0 "$2" 2>/dev/null && ((SECONDS < deadline)) || return 1
        sleep 0.05
    done
    # Another program may have taken the port and answered.
    kill -0 "$2" 2>/dev/null
}

# Ends all that was started, and waits for it.
stop_all() {
    local pid deadline=$((SECONDS + 5))
    for pid in ${PIDS[@]+"${PIDS[@]}"}; do kill -9 "$pid" 2>/dev/null || true; done
    for pid in ${PIDS[@]+"${PIDS[@]}"}; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.02; done
    done
    PIDS=()
    PORT_OF=() PID_OF=() REDIS_OF=() REDIS_PID_OF=()
}
