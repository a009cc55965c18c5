-- wrk script: each connection asks once in so many milliseconds, with one API key.
-- Prints one line: requests, 200, others than 200 and 429, socket errors, p50 and p99 in ms.
--
--   wrk -t1 -c40 -d10s -s wrk-paced.lua http://127.0.0.1:8080/ -- KEY MILLISECONDS

local threads = {}

function setup(thread)
   table.insert(threads, thread)
end

function init(args)
   ok, other, pause = 0, 0, tonumber(args[2])
   request_text = wrk.format("GET", nil, { ["X-Api-Key"] = args[1] })
end

function request()
   return request_text
end

-- Spread, so that the connections do not ask in step.
function delay()
   return math.random(0, 2 * pause)
end

function response(status)
   if status == 200 then ok = ok + 1 elseif status ~= 429 then other = other + 1 end
end

function done(summary, latency)
   local sum = { ok = 0, other = 0 }
   for _, thread in ipairs(threads) do
      for name in pairs(sum) do sum[name] = sum[name] + thread:get(name) end
   end
   local errors = summary.errors
   io.write(string.format("RESULT %d %d %d %d %.2f %.2f\n", summary.requests, sum.ok, sum.other,
      errors.connect + errors.read + errors.write + errors.timeout, latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
