-- A token bucket in Redis, run by limiter.lua for each request.
-- KEYS[1]: the bucket; ARGV: tokens per second, capacity. One token is asked for.
-- Returns the tokens that remain, or below 0 the milliseconds to wait.
--
-- What is stored is one number, the time at which the bucket is full again: one GET and one SET do what a hash with
-- level and time does with three calls. The time is that of Redis, so that several nginx would agree.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local token = 1000000 / ARGV[1] -- microseconds that one token takes to come back

local full_at = tonumber(redis.call('GET', KEYS[1]) or now)
if full_at < now then full_at = now end
full_at = full_at + token

local room = now + ARGV[2] * token - full_at
if room < 0 then return math.floor(room / 1000) end

-- Kept for a second more than it says anything, so that the key of a busy bucket is not deleted and made each time.
redis.call('SET', KEYS[1], string.format('%.0f', full_at), 'PX', math.ceil((full_at - now) / 1000) + 1000)
return math.floor(room / token)
