-- The sliding log: no window of that length ever holds more than the limit. Its twin is src/limit/sliding_log.rs.
--
-- A sorted set, one member for each unit of cost, by its time in microseconds: two of one moment are two members.
-- question: limit, a = length of the window, b = the most members that are kept

-- So many names and times in one command: far below what `unpack` can spread.
local WORDS = 2000

-- So many entries at `now`, numbered on from those of that moment, which count from 1 without a gap; the fault, if
-- there is one.
local function add_entries(key, amount)
  local same = call('ZCOUNT', key, now_text, now_text)
  local words = {}
  for i = 1, amount do
    words[#words + 1] = now_text
    words[#words + 1] = format('%s-%05d', now_text, same + i)
    if #words == WORDS or i == amount then
      local fault = pcall('ZADD', key, unpack(words))
      if type(fault) == 'table' and fault.err then return fault end
      words = {}
    end
  end
end

-- What a clock wrote that was far ahead would count until it is that late again. The new entries come first: a key
-- without any is gone, and its time to live with it.
local function dated_back_to_now(key)
  local ahead = '(' .. now_text
  if not add_entries(key, call('ZCOUNT', key, ahead, '+inf')) then
    pcall('ZREMRANGEBYSCORE', key, ahead, '+inf')
  end
end

ALGORITHMS.sliding_log = {
  look = function(key, question)
    local after = format('(%.0f', now - question.a)
    local used = pcall('ZCOUNT', key, after, '+inf')
    if type(used) == 'table' then return nil, used.err end
    local last = call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
    if last and last - now > question.a then dated_back_to_now(key) end
    return { count = used, after = after }
  end,

  judge = function(state, question, key)
    local leaves = function(first)
      local entry = call('ZRANGEBYSCORE', key, state.after, '+inf', 'WITHSCORES', 'LIMIT', first, 1)
      return entry[2] and to_ms(entry[2] + question.a - now) or 0
    end
    local limit, cost, used = question.limit, question.cost, state.count
    state.left = used < limit and limit - used or 0
    state.reset = used > 0 and leaves(used - 1) or 0
    if cost > limit then return 2, 0 end
    -- So many must leave, the oldest first.
    if cost > state.left then return 0, leaves(used + cost - limit - 1) end
    return 1, 0
  end,

  add = function(key, state, amount, question)
    local fault = pcall('ZREMRANGEBYSCORE', key, '-inf', format('%.0f', now - question.a))
    if type(fault) == 'table' and fault.err then return fault end
    if amount < 0 then
      fault = pcall('ZREMRANGEBYRANK', key, amount, -1)
      state.count = math.max(0, state.count + amount)
    else
      amount = math.min(amount, math.max(0, question.b - state.count))
      fault = add_entries(key, amount)
      state.count = state.count + amount
    end
    return fault
  end,
}
