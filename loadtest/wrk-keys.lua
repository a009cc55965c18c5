-- wrk script: cycle through a set of API keys and print the result on one line
-- that a shell script can read.
--
--   wrk -t1 -c64 -d3s -s wrk-keys.lua http://127.0.0.1:8080/ -- 1000
--
-- The one argument is the number of different keys (default 1000).

local requests = {}
local count = 0
local position = 0

-- Build every request up front, so that the load tool spends as little CPU as
-- possible per request: it shares the machine with the gateway it measures.
function init(args)
   count = tonumber(args[1]) or 1000
   for i = 1, count do
      requests[i] = wrk.format("GET", nil, { ["X-Api-Key"] = string.format("bench-%06d", i) })
   end
end

function request()
   position = position % count + 1
   return requests[position]
end

-- Tab-separated: RESULT, duration (us), requests, p50, p99, p99.9 (us),
-- responses with an error status, socket errors.
--
-- wrk counts a status as an error from 400 upwards. Looking at every status in
-- a response() hook would be stricter, but it would slow wrk down a lot.
function done(summary, latency, _)
   local errors = summary.errors
   local socket_errors = errors.connect + errors.read + errors.write + errors.timeout
   io.write(string.format(
      "RESULT\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n",
      summary.duration,
      summary.requests,
      latency:percentile(50),
      latency:percentile(99),
      latency:percentile(99.9),
      errors.status,
      socket_errors
   ))
end
