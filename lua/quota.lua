-- The quota: so many in each calendar day, week or month. Its twin is src/limit/quota.rs.
--
-- Held as a fixed window. Calendars are the gateway's: it tells where the present period begins and ends, and where
-- the next one ends; which one it is, Redis' own time says.
-- question: limit, a, b, c = begin of the present period, of the next one, and of the one after it

ALGORITHMS.quota = {
  look = function(key, question)
    local begin, ending = question.a, question.b
    if now >= ending then begin, ending = question.b, question.c end
    local state, reason = counted_since(key, begin)
    if state then state.ending = ending end
    return state, reason
  end,
  judge = judge_until,
  add = add_count,
}
