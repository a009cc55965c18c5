-- The fixed window: so many in each window of the clock. Its twin is src/limit/fixed_window.rs.
--
-- A hash: `count`, and `since`, the begin of the window in microseconds, at whole multiples of its length.
-- question: limit, a = length of a window

local ALGORITHMS = {}

-- The whole numbers of a hash, each at least 0; or nil and a reason.
local function numbers(key, ...)
  local found = pcall('HMGET', key, ...)
  if found.err then return nil, found.err end
  local is_new = not found[1]
  for i = 1, #found do
    local number = tonumber(found[i] or '0')
    if not number or not (number >= 0 and number <= EXACT) or (not found[i]) ~= is_new then
      return nil, 'BADSTATE the key does not hold what this limit counts'
    end
    found[i] = floor(number)
  end
  return found
end

local function dated_back(key, since)
  pcall('HSET', key, 'since', format('%.0f', since))
  return since
end

-- What is told of a period in which `count` was counted and that ends at `ending`: code, retry.
local function judge_until(state, question)
  state.left = state.count < question.limit and question.limit - state.count or 0
  state.reset = state.count > 0 and to_ms(state.ending - now) or 0
  if question.cost > question.limit then return 2, 0 end
  if question.cost > state.left then return 0, to_ms(state.ending - now) end
  return 1, 0
end

-- What is held of the period from `start` to `ending`. A clock that steps back stays in the later one; but what a
-- clock wrote that was far ahead is dated back, or it would count until it is that late again.
local function counted_since(key, start, ending)
  local held, reason = numbers(key, 'count', 'since')
  if not held then return nil, reason end
  local count, since = held[1], held[2]
  if since > ending then since = dated_back(key, start) end
  if since >= start then return { count = count, since = since } end
  return { count = 0, since = start }
end

local function add_count(key, state, amount, period)
  state.count = math.max(0, math.min(state.count + amount, EXACT))
  return pcall('HSET', key, 'count', format('%.0f', state.count), 'since', format('%.0f', state.since))
end

ALGORITHMS.fixed_window = {
  look = function(key, question)
    local start = now - now % question.a
    local state, reason = counted_since(key, start, start + question.a)
    if state then state.ending = state.since + question.a end
    return state, reason
  end,
  judge = judge_until,
  add = add_count,
}
