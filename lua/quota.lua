-- The quota: so many in each calendar day, week or month. Its twin is src/limit/quota.rs.
--
-- Held as a fixed window. Calendars are the gateway's: it tells where the period before begins, the present one, the
-- next one and the one after that; which one it is, Redis' own time says. Where that is none of them, the first and the
-- last go on at their length: no calendar, but an end.
-- question: limit, a, b, c, ttl = these four

ALGORITHMS.quota = {
  look = function(key, question)
    local before, begin, ending, last = question.a, question.b, question.c, question.ttl + 0
    if now < before then
      local length = math.max(begin - before, 1)
      ending = before - floor((before - now - 1) / length) * length
      begin = math.max(ending - length, 0)
    elseif now < begin then
      begin, ending = before, begin
    elseif now >= last then
      local length = math.max(last - ending, 1)
      begin = now - (now - last) % length
      ending = begin + length
    elseif now >= ending then
      begin, ending = ending, last
    end
    local state, reason = counted_since(key, begin, ending)
    if state then
      state.ending = ending
      -- What was taken in a period that is over is not given back into the next one.
      state.is_over = begin ~= question.b
    end
    return state, reason
  end,
  judge = judge_until,
  add = add_count,
}
