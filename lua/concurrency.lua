-- Concurrency: so many at the same time. Its twin is src/limit/concurrency.rs.
--
-- A sorted set of permits by the time until which they count. One that is not renewed counts no more, so those of a
-- dead gateway come back.
-- question: limit, a = how long a permit counts, b = the permit

local function counts_still(key, permit)
  local until_then = call('ZSCORE', key, permit)
  return until_then and until_then + 0 > now
end

-- Takes out what counts no more; the fault, if there is one.
local function forget_the_dead(key)
  local removed = pcall('ZREMRANGEBYSCORE', key, '-inf', now_text)
  return type(removed) == 'table' and removed.err and removed or nil
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
    local counts = counts_still(key, question.b_text)
    if amount < 0 then
      if not counts then return nil end
      state.count = state.count - 1
      return forget_the_dead(key) or pcall('ZREM', key, question.b_text)
    end
    if not counts then state.count = state.count + 1 end
    return forget_the_dead(key) or pcall('ZADD', key, format('%.0f', now + question.a), question.b_text)
  end,

  renew = function(key, _, question)
    return counts_still(key, question.b_text)
      and (forget_the_dead(key) or pcall('ZADD', key, 'XX', format('%.0f', now + question.a), question.b_text))
  end,
}
