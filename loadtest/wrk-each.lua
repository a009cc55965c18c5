-- wrk script: each of so many tenants asks once on each of so many routes, /r1, /r2 ..., then all is over.
--
--   wrk -t1 -c32 -d80s -s wrk-each.lua http://127.0.0.1:8080/ -- TENANTS ROUTES
--
-- wrk itself waits until its time is up. Prints one line: requests and those that were not answered 2xx.

local threads = {}

function setup(thread)
   table.insert(threads, thread)
end

function init(args)
   tenants, routes = tonumber(args[1]), tonumber(args[2])
   sent, answered, other = 0, 0, 0
end

function request()
   local turn = sent % (tenants * routes)
   sent = sent + 1
   local key = string.format("tenant-%06d", turn % tenants)
   return wrk.format("GET", "/r" .. (math.floor(turn / tenants) + 1), { ["X-Api-Key"] = key })
end

function response(status)
   answered = answered + 1
   if status ~= 200 then other = other + 1 end
   if answered >= tenants * routes then wrk.thread:stop() end
end

function done()
   local sum = { answered = 0, other = 0 }
   for _, thread in ipairs(threads) do
      for name in pairs(sum) do sum[name] = sum[name] + thread:get(name) end
   end
   io.write(string.format("RESULT %d %d\n", sum.answered, sum.other))
end
