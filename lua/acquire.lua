-- One flight: many requests, each decided for itself, all of its checks or none.
--
-- KEYS  one key per check, in the order of the checks
-- ARGV  the number of different questions; for each of them the algorithm, cost, four numbers of the limit, ttl in
--       ms, and what is demanded; then per request the position of its check's question, from 1.
--       A request of several checks begins with their number as -2, -3 ...
--       Token bucket: cost and capacity in units, then n, d, scale. The others: their limit, and a, b, c as
--       they say.
--       Demands: `take` the cost, if all that take can; `peek` is refused like it, and takes nothing; `watch`
--       is told the same, and holds nobody up; `debit`
--       what was spent already: never refused, and it may leave a bucket below 0, so that what was spent too early
--       is earned before the next request passes; `shadow` takes for itself, whatever becomes of the others;
--       `lease` takes whole tokens in advance, as many as there are up to the cost; `return` gives such back, or a
--       permit; `renew` lets a permit go on
-- reply {now in microseconds, then per check: code, remaining, retry in ms, reset in ms}
--       code 1 allowed, 0 refused, 2 can never pass, 3 leased (their number in the place of `retry`),
--       -1 fault (its text in the place of `remaining`)
--
-- A refusal writes nothing, unless the key would expire before it is full again: a missing key
-- counts as full, so its time to live must outlast the refill (a slower rule, or a PERSIST by hand).

-- By their position as it stands in ARGV: a text.
local QUESTIONS = {}
local UNITS, AT = {}, {}
local reply = { now }
local key, arg, out = 0, 2, 1
local last = #ARGV

local algorithms

for i = 1, ARGV[1] do
  local algorithm, cost, demand = nil, ARGV[arg + 1] + 0, ARGV[arg + 7]
  if ARGV[arg] ~= 'token_bucket' then
    algorithms = algorithms or other_algorithms()
    algorithm = algorithms[ARGV[arg]]
  end
  local limit = ARGV[arg + 2] + 0
  -- One capacity below 0 at most, and never so far that what is missing cannot be counted.
  local lowest = -math.min(limit, EXACT - limit)
  local question = {
    algorithm = algorithm,
    cost = cost,
    ttl = ARGV[arg + 6],
    demand = demand,
    special = demand ~= 'take' and demand ~= 'shadow' and demand ~= 'peek' and demand ~= 'watch',
    debit = demand == 'debit',
    shadow = demand == 'shadow',
    takes = demand == 'take',
    votes = (demand == 'take' or demand == 'peek') and cost > 0,
  }
  if algorithm then
    question.limit = limit
    question.a, question.b, question.c = ARGV[arg + 3] + 0, ARGV[arg + 4] + 0, ARGV[arg + 5] + 0
    question.b_text = ARGV[arg + 4]
  else
    question.capacity = limit
    question.lowest = lowest
    question.least = demand == 'debit' and limit - EXACT or lowest -- a debit only subtracts
    question.n, question.d, question.scale = ARGV[arg + 3] + 0, ARGV[arg + 4] + 0, ARGV[arg + 5] + 0
  end
  QUESTIONS[tostring(i)] = question
  arg = arg + 8
end

-- One check of another algorithm than the token bucket, once it is known what becomes of the request: code,
-- remaining, retry and reset, or a fault.
local function spend(key, question, state, code, retry, admitted)
  local algorithm, fault = question.algorithm, nil
  local amount = 0
  if question.demand == 'return' then
    amount = state.count > 0 and not state.is_over and -question.cost or 0
  elseif question.debit then
    amount = admitted and question.demand == 'debit' and not algorithm.renew and question.cost or 0
  elseif code == 1 and (admitted and question.takes or question.shadow) then
    amount = question.cost
  end
  if amount ~= 0 then
    fault = algorithm.add(key, state, amount, question)
  elseif question.demand == 'renew' and algorithm.renew then
    fault = algorithm.renew(key, state, question)
  end
  if type(fault) == 'table' and fault.err then return nil, fault.err end
  if amount ~= 0 or question.special then
    local cost = question.cost
    question.cost = 0
    code, retry = algorithm.judge(state, question, key)
    question.cost = cost
  end
  -- A key lives until it counts no more; also after a rule with a longer window came.
  if state.reset > 0 and (amount ~= 0 or question.demand == 'renew' or code == 0 and call('PTTL', key) < state.reset) then
    pcall('PEXPIRE', key, format('%.0f', state.reset))
  end
  return code, state.left, retry, state.reset
end

while arg <= last do
  local checks = 1
  if not QUESTIONS[ARGV[arg]] then
    checks = -ARGV[arg]
    arg = arg + 1
  end
  local fault, admitted = nil, true

  for i = 1, checks do
    local question = QUESTIONS[ARGV[arg + i - 1]]
    if question.algorithm then
      local state, reason = question.algorithm.look(KEYS[key + i], question)
      if not state then
        fault = reason
        break
      end
      local cost = question.cost
      if question.special then question.cost = 0 end
      state.code, state.retry = question.algorithm.judge(state, question, KEYS[key + i])
      question.cost = cost
      UNITS[i] = state
      if state.code ~= 1 and question.votes then admitted = false end
    else
      local units, at = refilled(KEYS[key + i], question)
      if not units then
        fault = at
        break
      end
      UNITS[i], AT[i] = units, at
      if question.cost > units and question.votes then admitted = false end
    end
  end

  for i = 1, checks do
    local question = QUESTIONS[ARGV[arg + i - 1]]
    if not fault and question.algorithm then
      local state = UNITS[i]
      local code, left, retry, reset = spend(KEYS[key + i], question, state, state.code, state.retry, admitted)
      if code then
        reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] = code, left, retry, reset
      else
        fault = left
      end
    elseif not fault then
      local units, at, cost, capacity = UNITS[i], AT[i], question.cost, question.capacity
      local code, retry = 1, 0
      if question.special then
        local before = units
        if question.debit then
          if admitted and units ~= UNCOUNTABLE then
            units = math.max(units - cost, math.min(units, question.lowest))
          end
        elseif question.demand == 'lease' then
          code = 3
          if units > 0 then
            retry = math.min(cost, units - units % question.scale) / question.scale
            units = units - retry * question.scale
          end
        elseif question.demand == 'return' then
          units = math.min(units + cost, capacity)
        end
        if units ~= before then fault = store(KEYS[key + i], units, at, question) end
      elseif cost > capacity then
        code = 2
      elseif cost > units and cost > 0 then
        code = 0
        retry = to_ms(at + time_to_earn(cost - units, question.n, question.d) - now)
      elseif (admitted and question.takes or question.shadow) and cost > 0 then
        units = units - cost
        fault = store(KEYS[key + i], units, at, question)
      end
      local missing = units < capacity and capacity - units or 0
      local reset = to_ms(at + time_to_earn(missing, question.n, question.d) - now)
      if (code == 0 or code == 3 and retry == 0) and call('PTTL', KEYS[key + i]) < reset then
        pcall('PEXPIRE', KEYS[key + i], question.ttl) -- a replica refuses; the neighbours go on
      end
      reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] =
        code, units > 0 and floor(units / question.scale) or 0, retry, reset
    end
    if fault then
      reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] = -1, fault, 0, 0
    end
    out = out + 4
  end

  key = key + checks
  arg = arg + checks
end

return reply
