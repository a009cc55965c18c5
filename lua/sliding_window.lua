-- The sliding window: so many in about any window, from two counters. Its twin is src/limit/sliding_window.rs.
--
-- A hash: `count` of the window that began at `since`, `previous` of the one before, which is weighted by what
-- remains of it. Counts times milliseconds stay below 2^53.
-- question: limit, a = length of a window, whole milliseconds

ALGORITHMS.sliding_window = {
  look = function(key, question)
    local held, reason = numbers(key, 'count', 'previous', 'since')
    if not held then return nil, reason end
    local count, previous, since = held[1], held[2], held[3]
    local start = now - now % question.a
    if since > start + question.a then since = dated_back(key, start) end
    if since >= start then return { count = count, previous = previous, since = since } end
    if since >= start - question.a then return { count = 0, previous = count, since = start } end
    return { count = 0, previous = 0, since = start }
  end,

  judge = function(state, question)
    local limit, cost, window = question.limit, question.cost, question.a / 1000
    local passed = math.min(math.max(floor((now - state.since) / 1000), 0), window)
    local rest = window - passed
    local all = limit * window
    -- An edit to a lower limit leaves counts that are far above it.
    local count, previous = math.min(state.count, 2 * limit), math.min(state.previous, 2 * limit)
    local used = count * window + previous * rest
    state.left = floor(math.max(all - used, 0) / window)
    state.reset = (count > 0 and rest + window) or (previous > 0 and rest) or 0
    if cost > limit then return 2, 0 end
    if cost == 0 or used + cost * window <= all then return 1, 0 end
    local retry
    if count + cost <= limit then
      retry = window - floor((all - (count + cost) * window) / previous) - passed
    else
      retry = rest + (window - floor((all - cost * window) / count))
    end
    return 0, math.max(retry, 1)
  end,

  add = function(key, state, amount)
    state.count = math.max(0, math.min(state.count + amount, EXACT))
    return pcall('HSET', key, 'count', format('%.0f', state.count), 'previous', format('%.0f', state.previous),
      'since', format('%.0f', state.since))
  end,
}
