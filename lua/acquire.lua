-- One flight: many requests, each decided for itself, all of its checks or none.
--
-- KEYS  one bucket per check, in the order of the checks
-- ARGV  per request: the number of its checks; then for each check
--       cost, capacity (both in units), n, d, scale, ttl in ms; a cost below 0 is a debit of what was
--       spent already: as much of it as there is, never refused
-- reply {now in microseconds, then per check: code, remaining, retry in ms, reset in ms}
--       code 1 allowed, 0 refused, 2 can never pass, -1 fault (its text in the place of `remaining`)
--
-- A refusal writes nothing, unless the key would expire before it is full again: a missing key
-- counts as full, so its time to live must outlast the refill (a slower rule, or a PERSIST by hand).

local COST, CAPACITY, N, D, SCALE, DEBIT = {}, {}, {}, {}, {}, {}
local UNITS, AT = {}, {}
local reply = { now }
local key, arg, out = 0, 1, 1
local last = #ARGV

while arg <= last do
  local checks = ARGV[arg] + 0
  local first = arg + 1
  local fault, admitted = nil, true

  for i = 1, checks do
    local a = first + (i - 1) * 6
    local cost, capacity, n, d, scale = ARGV[a] + 0, ARGV[a + 1] + 0, ARGV[a + 2] + 0, ARGV[a + 3] + 0, ARGV[a + 4] + 0
    local units, at = refilled(KEYS[key + i], capacity, n, d, scale, cost < 0)
    if not units then
      fault = at
      break
    end
    DEBIT[i] = cost < 0
    if cost < 0 then
      cost = -cost
      if cost > units then cost = units end
    end
    COST[i], CAPACITY[i], N[i], D[i], SCALE[i], UNITS[i], AT[i] = cost, capacity, n, d, scale, units, at
    if cost > units then admitted = false end
  end

  for i = 1, checks do
    if not fault then
      local cost, capacity, n, d, scale, units, at = COST[i], CAPACITY[i], N[i], D[i], SCALE[i], UNITS[i], AT[i]
      local ttl = ARGV[first + i * 6 - 1]
      local code, retry = 1, 0
      if cost > capacity and not DEBIT[i] then
        code = 2
      elseif cost > units then
        code = 0
        retry = to_ms(at + time_to_earn(cost - units, n, d) - now)
      elseif admitted and cost > 0 then
        units = units - cost
        fault = store(KEYS[key + i], units, at, scale, ttl, DEBIT[i])
      end
      local missing = capacity - units
      if missing < 0 then missing = 0 end
      local reset = to_ms(at + time_to_earn(missing, n, d) - now)
      if code == 0 and call('PTTL', KEYS[key + i]) < reset then
        pcall('PEXPIRE', KEYS[key + i], ttl) -- a replica refuses; the neighbours go on
      end
      reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] = code, floor(units / scale), retry, reset
    end
    if fault then
      reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] = -1, fault, 0, 0
    end
    out = out + 4
  end

  key = key + checks
  arg = first + checks * 6
end

return reply
