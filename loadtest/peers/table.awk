# Prints the table of one workload. Variables: workload, peers, with_redis (peers that use one), rounds, pace (of each
# connection, ms), hz (ticks per second). Columns of a row: round (0: warm-up), peer, "RESULT", duration (us), requests, p50, p99, p99.9 (us), statuses
# from 400 upwards, statuses other than 200 and 429 (warm-up only), socket errors, CPU ticks of the peer, CPU ticks of its
# Redis, calls of Redis. Exit code 1: a row is invalid.

# Not every awk has a sort function.
function sort(list, n,    i, j, value) {
    for (i = 2; i <= n; i++) {
        value = list[i]
        for (j = i - 1; j >= 1 && list[j] > value; j--) list[j + 1] = list[j]
        list[j + 1] = value
    }
}

# The rounds' values of a metric, sorted, into `list`; with a base, in proportion to that peer in the same round.
function collect(metric, peer, base,    i) {
    for (i = 1; i <= rounds; i++) {
        list[i] = data[metric, peer, i]
        if (base != "") list[i] /= data[metric, base, i]
    }
    sort(list, rounds)
}

function middle() {
    return rounds % 2 ? list[(rounds + 1) / 2] : (list[rounds / 2] + list[rounds / 2 + 1]) / 2
}

function median(metric, peer) {
    collect(metric, peer, "")
    return middle()
}

function spread(format, metric, peer, base) {
    collect(metric, peer, base)
    return sprintf(format " (" format ".." format ")", middle(), list[1], list[rounds])
}

function ratio(metric, peer,    i) {
    if (!(BASE in seen)) return "-"
    # A slice can be too short for the clock that counts CPU time.
    for (i = 1; i <= rounds; i++) if (data[metric, BASE, i] == 0) return "-"
    return peer == BASE ? "1" : spread("%.3f", metric, peer, BASE)
}

# What p99 is above that of the base in the same round, in ms. At saturation that is nobody's latency.
function added(peer,    i) {
    if (pace == 0 || !(BASE in seen) || peer == BASE) return "-"
    for (i = 1; i <= rounds; i++) list[i] = (data["p99", peer, i] - data["p99", BASE, i]) / 1000
    sort(list, rounds)
    return sprintf("%.2f (%.2f..%.2f)", middle(), list[1], list[rounds])
}

function redis_only(format, metric, peer) {
    return has(with_redis, peer) ? sprintf(format, median(metric, peer)) : "-"
}

function ms(metric, peer) { return sprintf("%.2f", median(metric, peer) / 1000) }

function has(words, word) { return index(" " words " ", " " word " ") > 0 }

# Why the row of a peer says nothing, or "".
function fault(peer,    share) {
    share = refused[peer] / requests[peer]
    if (others[peer] > 0) return others[peer] " answers of the warm-up were neither 200 nor 429"
    if (socket_errors[peer] > 0) return socket_errors[peer] " socket errors or timeouts"
    if (workload == "over" && peer !~ /-plain$/) {
        return pace == 0 && share < 0.95 ? sprintf("only %.2f %% were refused", share * 100) : ""
    }
    return share > 0.001 ? sprintf("%.2f %% were refused, and none had to be", share * 100) : ""
}

BEGIN { BASE = "tollgate-plain" }

{
    seen[$2] = 1
    others[$2] += $10
    socket_errors[$2] += $11
}

$1 > 0 {
    data["rate", $2, $1] = $5 / $4 * 1e6
    data["p50", $2, $1] = $6
    data["p99", $2, $1] = $7
    data["p999", $2, $1] = $8
    data["cpu", $2, $1] = $12 / hz / $5 * 1e5
    data["redis_cpu", $2, $1] = $13 / hz / $5 * 1e5
    data["calls", $2, $1] = $14 / $5
    requests[$2] += $5
    refused[$2] += $9
}

END {
    printf "### %s\n\n", workload
    print "| peer | req/s | req/s : " BASE " | proxy CPU s / 100k | proxy CPU : " BASE " | Redis CPU s / 100k | Redis calls / request | p50 ms | p99 ms | p99 added ms | p99.9 ms | refused |"
    print "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    count = split(peers, order, " ")
    for (i = 1; i <= count; i++) {
        peer = order[i]
        reason = fault(peer)
        if (reason != "") notes = notes "\n**" peer " is invalid: " reason ".**\n"
        printf "| %s%s | %s | %s | %.3f | %s | %s | %s | %s | %s | %s | %s | %.2f %% |\n", peer, reason == "" ? "" : " **(invalid)**",
            spread("%.0f", "rate", peer, ""), ratio("rate", peer), median("cpu", peer), ratio("cpu", peer),
            redis_only("%.3f", "redis_cpu", peer), redis_only("%.4f", "calls", peer),
            ms("p50", peer), ms("p99", peer), added(peer), ms("p999", peer), refused[peer] / requests[peer] * 100
    }
    print "\nMedians over the rounds, (min..max); a ratio or difference is taken within each round."
    if (workload == "over") print "The two plain rows have no limit: they show what it costs to let all through."
    printf "%s", notes
    exit notes != ""
}
