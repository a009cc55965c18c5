-- One flight: many requests, each decided for itself, all of its checks or none.
--
-- KEYS  one bucket per check, in the order of the checks
-- ARGV  the number of different questions; for each of them cost, capacity (both in units), n, d, scale,
--       ttl in ms, and what is demanded; then per request the position of its check's question, from 1.
--       A request of several checks begins with their number as -2, -3 ...
--       Demands: `take` the cost, if all that take can; `debit` what was spent already: never refused,
--       and it may leave the bucket below 0, so that what was spent too early is earned before the
--       next request passes; `shadow` takes for itself, whatever becomes of the others; `lease` takes
--       whole tokens in advance, as many as there are up to the cost; `return` gives such back
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

for i = 1, ARGV[1] do
  local cost, capacity, demand = ARGV[arg] + 0, ARGV[arg + 1] + 0, ARGV[arg + 6]
  -- One capacity below 0 at most, and never so far that what is missing cannot be counted.
  local lowest = -math.min(capacity, EXACT - capacity)
  QUESTIONS[tostring(i)] = {
    cost = cost,
    capacity = capacity,
    lowest = lowest,
    least = demand == 'debit' and capacity - EXACT or lowest, -- a debit only subtracts
    n = ARGV[arg + 2] + 0,
    d = ARGV[arg + 3] + 0,
    scale = ARGV[arg + 4] + 0,
    ttl = ARGV[arg + 5],
    special = demand ~= 'take' and demand ~= 'shadow' and demand or nil,
    debit = demand == 'debit',
    shadow = demand == 'shadow',
    votes = demand == 'take' and cost > 0,
  }
  arg = arg + 7
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
    local units, at = refilled(KEYS[key + i], question)
    if not units then
      fault = at
      break
    end
    UNITS[i], AT[i] = units, at
    if question.cost > units and question.votes then admitted = false end
  end

  for i = 1, checks do
    if not fault then
      local question = QUESTIONS[ARGV[arg + i - 1]]
      local units, at, cost, capacity = UNITS[i], AT[i], question.cost, question.capacity
      local code, retry = 1, 0
      if question.special then
        local before = units
        if question.debit then
          if admitted and units ~= UNCOUNTABLE then
            units = math.max(units - cost, math.min(units, question.lowest))
          end
        elseif question.special == 'lease' then
          code = 3
          if units > 0 then
            retry = math.min(cost, units - units % question.scale) / question.scale
            units = units - retry * question.scale
          end
        else
          units = math.min(units + cost, capacity)
        end
        if units ~= before then fault = store(KEYS[key + i], units, at, question) end
      elseif cost > capacity then
        code = 2
      elseif cost > units and cost > 0 then
        code = 0
        retry = to_ms(at + time_to_earn(cost - units, question.n, question.d) - now)
      elseif (admitted or question.shadow) and cost > 0 then
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
