-- The quota: so many in each calendar day, week or month. Its twin is src/limit/quota.rs.
--
-- Held as a fixed window. Calendars are the gateway's: it tells where the period before begins, the present one, the
-- next one and the one after that; which one it is, Redis' own time says.
-- question: limit, a, b, c, ttl = these four

ALGORITHMS.quota = {
  look = function(key, question)
    local begin, ending = question.b, question.c
    if now < begin then
      begin, ending = question.a, question.b
    elseif now >= ending then
      begin, ending = question.c, question.ttl + 0
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
