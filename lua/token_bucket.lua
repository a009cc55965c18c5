-- The token bucket. Its twin is src/limit/token_bucket.rs: same integers, same order, same verdicts.
--
-- Numbers are whole: tokens are counted in units of 1/scale token, time in microseconds, and the
-- refill is `n` units each `d` microseconds (n * d <= 2^53, so that every product here is exact).
-- A stored bucket is a hash: `tokens` (decimal, at most six places) and `ts` (microseconds).
-- `tokens` is below 0 where more was spent without Redis than there was; it refills from there.
-- Most rates have d = 1 (whole tokens per second, at the usual scale): their way is the short one.

local call, pcall = redis.call, redis.pcall
local floor, ceil, format = math.floor, math.ceil, string.format
local now_text = format('%d', now)

-- Up to here doubles count exactly.
local EXACT = 9007199254740992

-- What stands for more units than can be counted in the scale at hand.
local UNCOUNTABLE = 2 * EXACT

-- 100 years in microseconds: the longest wait that is told, and below 2^53.
local FOREVER = 3155760000000000

-- Microseconds that it takes to earn `need` units.
local function time_to_earn(need, n, d)
  local time
  if d == 1 then
    time = ceil(need / n)
  else
    local whole = floor(need / n)
    time = whole * d + ceil((need - whole * n) * d / n)
  end
  if time > FOREVER then return FOREVER end
  return time
end

local function to_ms(micros)
  if micros > FOREVER then micros = FOREVER elseif micros < 0 then micros = 0 end
  return ceil(micros / 1000)
end

-- What the key holds now: units and the time up to which they are counted, or nil and a reason. A
-- debit may come from an older rule: it only subtracts, so what is above its capacity stays there.
local function refilled(key, question)
  local state = pcall('HMGET', key, 'tokens', 'ts')
  if state.err then return nil, state.err end
  local tokens, at = state[1], state[2]
  local capacity, n, d, scale = question.capacity, question.n, question.d, question.scale
  if not tokens and not at then return capacity, now end
  tokens, at = tonumber(tokens or ''), tonumber(at or '')
  if not tokens or not at or not (tokens >= -EXACT and tokens <= EXACT) or not (at >= 0 and at <= EXACT) then
    return nil, 'BADSTATE the key does not hold a token bucket'
  end
  local exact = tokens * scale
  local units = floor(exact)
  if exact - units >= 0.5 then units = units + 1 end -- not floor(x + 0.5): that is not exact near 2^53
  if units < question.least then units = question.least end
  at = floor(at)
  local elapsed = now - at
  -- A clock that was far ahead once must not freeze the bucket until it is that late again: from one fill time
  -- on, the wait begins anew.
  if elapsed < 0 and -elapsed > time_to_earn(capacity, n, d) then
    at, elapsed = now, 0
    pcall('HSET', key, 'ts', now_text)
  end
  if units > capacity then
    if question.debit and units > EXACT then return UNCOUNTABLE, at end
    if question.debit then return units, elapsed > 0 and now or at end
    units = capacity
  end
  if elapsed <= 0 then return units, at end -- a clock that steps back mints nothing
  if d == 1 then
    units = units + elapsed * n
    if units >= capacity then return capacity, now end
    return units, now
  end
  local periods = floor(elapsed / d)
  local part = (elapsed - periods * d) * n
  local partial = floor(part / d)
  units = units + periods * n + partial
  if units >= capacity then return capacity, now end
  -- Time that has not made up a whole unit yet stays on the clock: it is never thrown away.
  return units, now - floor((part - partial * d) / n)
end

-- Units as tokens. By whole numbers: a double takes several times as long to write.
local function as_tokens(units, scale)
  local sign = ''
  if units < 0 then units, sign = -units, '-' end
  local whole = floor(units / scale)
  local rest = units - whole * scale
  if rest == 0 then return format('%s%d', sign, whole) end
  if scale == 1000 then return format('%s%d.%03d', sign, whole, rest) end
  return format('%s%d.%06d', sign, whole, rest)
end

-- Writes a bucket; gives the reason if Redis does not take it. Numbers go as text: how a Lua number
-- is written into a command differs between versions of Redis.
local function store(key, units, at, question)
  local ts = at == now and now_text or format('%d', at)
  local stored = pcall('HSET', key, 'tokens', as_tokens(units, question.scale), 'ts', ts)
  if type(stored) == 'table' and stored.err then return stored.err end
  -- A debit, or what is given back, from an older and faster rule must not shorten a life.
  if (question.debit or question.demand == 'return') and call('PTTL', key) >= question.ttl + 0 then return nil end
  pcall('PEXPIRE', key, question.ttl)
end
