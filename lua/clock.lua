-- Time is Redis' own: no gateway's clock can mint a token, however wrong it is.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
