-- One flight: many requests, each decided for itself, all of its checks or none.
--
-- KEYS  one bucket per check, in the order of the checks
-- ARGV  per request: the number of its checks; then for each check
--       cost, capacity (both in units), n, d, scale, ttl in ms
-- reply {now in microseconds, then per check: code, remaining, retry in ms, reset in ms}
--       code 1 allowed, 0 refused, 2 can never pass, -1 fault (its text in the place of `remaining`)
--
-- A refusal writes nothing, unless the key would expire before it is full again: a missing key
-- counts as full, so its time to live must outlast the refill (a slower rule, or a PERSIST by hand).

local UNITS_AT = {}
local COUNTED_AT = {}
local reply = { now }
local key, arg, out = 0, 1, 1
local last = #ARGV

while arg <= last do
  local checks = tonumber(ARGV[arg])
  local first = arg + 1
  local fault, admitted = nil, true

  for i = 1, checks do
    local a = first + (i - 1) * 6
    local cost, capacity = tonumber(ARGV[a]), tonumber(ARGV[a + 1])
    local units, at = refilled(KEYS[key + i], capacity, tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]),
      tonumber(ARGV[a + 4]))
    if not units then
      fault = at
      break
    end
    UNITS_AT[i], COUNTED_AT[i] = units, at
    if cost > units then admitted = false end
  end

  for i = 1, checks do
    local a = first + (i - 1) * 6
    if fault then
      reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] = -1, fault, 0, 0
    else
      local cost, capacity = tonumber(ARGV[a]), tonumber(ARGV[a + 1])
      local n, d, scale = tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
      local units, at = UNITS_AT[i], COUNTED_AT[i]
      local code, retry = 1, 0
      if cost > capacity then
        code = 2
      elseif cost > units then
        code = 0
        retry = to_ms(at + time_to_earn(cost - units, n, d) - now)
      elseif admitted and cost > 0 then
        units = units - cost
        fault = store(KEYS[key + i], units, at, scale, ARGV[a + 5])
      end
      local reset = to_ms(at + time_to_earn(capacity - units, n, d) - now)
      if code == 0 and redis.call('PTTL', KEYS[key + i]) < reset then
        redis.pcall('PEXPIRE', KEYS[key + i], ARGV[a + 5]) -- a replica refuses; the neighbours go on
      end
      if fault then
        reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] = -1, fault, 0, 0
      else
        reply[out + 1], reply[out + 2], reply[out + 3], reply[out + 4] = code, floor(units / scale), retry, reset
      end
    end
    out = out + 4
  end

  key = key + checks
  arg = first + checks * 6
end

return reply
