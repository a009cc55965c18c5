-- Concurrency: so many at the same time. Its twin is src/limit/concurrency.rs.
--
-- A sorted set of permits by the time until which they count. One that is not renewed counts no more, so those of a
-- dead gateway come back.
-- question: limit, a = how long a permit counts, b = the permit

local function counts_still(key, permit)
  local until_then = call('ZSCORE', key, permit)
  return until_then and until_then + 0 > now
end

ALGORITHMS.concurrency = {
  look = function(key)
    local held = pcall('ZCOUNT', key, format('(%.0f', now), '+inf')
    if type(held) == 'table' then return nil, held.err end
    return { count = held }
  end,

  judge = function(state, question, key)
    state.left = state.count < question.limit and question.limit - state.count or 0
    local last = call('ZRANGE', key, -1, -1, 'WITHSCORES')
    state.reset = last[2] and to_ms(last[2] - now) or 0
    -- When one comes back nobody knows.
    if question.cost > 0 and state.left == 0 then return 0, 1000 end
    return 1, 0
  end,

  add = function(key, state, amount, question)
    local fault
    if amount < 0 then
      local counts = counts_still(key, question.b_text)
      fault = pcall('ZREM', key, question.b_text)
      if counts then state.count = state.count - 1 end
    else
      fault = pcall('ZREMRANGEBYSCORE', key, '-inf', now_text)
      if type(fault) == 'table' and fault.err then return fault end
      if not counts_still(key, question.b_text) then state.count = state.count + 1 end
      fault = pcall('ZADD', key, format('%.0f', now + question.a), question.b_text)
    end
    return fault
  end,

  renew = function(key, _, question)
    return counts_still(key, question.b_text) and pcall('ZADD', key, 'XX', format('%.0f', now + question.a), question.b_text)
  end,
}
