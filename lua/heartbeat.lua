-- One gateway says that it lives, and learns how many do.
--
-- KEYS[1]  the sorted set of gateways by the time of their last word
-- ARGV     the gateway's id, and the time in ms after which a silent one counts as gone
-- reply    gateways that live

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now - ARGV[2]))
-- Words from the future are left from a clock that was ahead.
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now + ARGV[2]), '+inf')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
