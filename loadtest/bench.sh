#!/usr/bin/env bash
#
# What limiting costs: the same binary without limits, with limits in memory, in Redis, and in Redis with leases, in
# paired rounds on one machine. It is peers/compare on the gateway alone, once the machine is quiet.
#
# Environment: ARMS  what is compared, by word (default: plain memory redis default)
#              and what `peers/compare -h` tells: ROUNDS, SLICE, CONNECTIONS, PACE, WORKLOADS, QUIET, TOLLGATE

set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
peers=()
for arm in ${ARMS:-plain memory redis default}; do peers+=("tollgate-$arm"); done
PEERS=${peers[*]} NO_INSTALL=1 exec "$HERE/peers/compare" "$@"
