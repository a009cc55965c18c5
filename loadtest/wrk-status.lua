-- wrk script: three of four requests for the tenant `open`, one for `limited`; counts each status.
-- Prints one line: requests, 200, 429, others, socket errors, p50, p99 and maximum in ms, and the 200 of `limited`,
-- told by its limit: which of two connections an answer came on wrk does not say.

local threads = {}

function setup(thread)
   table.insert(threads, thread)
end

function init(_)
   ok, refused, other, limited, position, requests = 0, 0, 0, 0, 0, {}
   for i = 1, 4 do
      requests[i] = wrk.format("GET", nil, { ["X-Api-Key"] = i == 4 and "limited" or "open" })
   end
end

function request()
   position = position % 4 + 1
   return requests[position]
end

function response(status, headers)
   if status == 200 then
      ok = ok + 1
      if (tonumber(headers["X-RateLimit-Limit"]) or 0) < 1000000 then limited = limited + 1 end
   elseif status == 429 then
      refused = refused + 1
   else
      other = other + 1
   end
end

function done(summary, latency, _)
   local sum = { ok = 0, refused = 0, other = 0, limited = 0 }
   for _, thread in ipairs(threads) do
      for name in pairs(sum) do
         sum[name] = sum[name] + thread:get(name)
      end
   end
   local errors = summary.errors
   io.write(string.format("RESULT %d %d %d %d %d %.2f %.2f %.1f %d\n", summary.requests, sum.ok, sum.refused, sum.other,
      errors.connect + errors.read + errors.write + errors.timeout,
      latency:percentile(50) / 1000, latency:percentile(99) / 1000, latency.max / 1000, sum.limited))
end
