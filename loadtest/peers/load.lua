-- wrk script: the load of one slice. Prints one line that a shell script can read.
--
--   wrk -t1 -c64 -d2s -s load.lua http://127.0.0.1:8080/ -- WORKLOAD ROUND [check]
--
-- Workloads: tenants  1,000 keys in turn
--            hot      one key
--            over     one key
--            mixed    100,000 keys, Zipf: the k-th is asked for 1/k times as often as the first
--
-- Each connection asks as soon as it has its answer; with PACE in the environment, so many milliseconds after it, on
-- average.
--
-- With `check`, statuses other than 200 and 429 are counted too. That costs wrk much, so measured slices do without.

local TENANTS, MIXED, DRAWS, SEED = 1000, 100000, 200000, 20240229

local sequence, position = {}, 0

local function request_of(number)
   return wrk.format("GET", nil, { ["X-Api-Key"] = string.format("tenant-%06d", number) })
end

-- Numbers from 0 to below 1, the same on every machine.
local function random_from(seed)
   local state = seed
   return function()
      state = (state * 16807) % 2147483647
      return state / 2147483647
   end
end

-- The first index whose sum is above the sought value.
local function find(sums, sought)
   local low, high = 1, #sums
   while low < high do
      local middle = math.floor((low + high) / 2)
      if sums[middle] > sought then high = middle else low = middle + 1 end
   end
   return low
end

-- Requests are made up front, so that wrk takes as little as possible of the machine it shares with the proxy.
local function draw_mixed()
   local sums, sum, made, random = {}, 0, {}, random_from(SEED)
   for k = 1, MIXED do
      sum = sum + 1 / k
      sums[k] = sum
   end
   for i = 1, DRAWS do
      local k = find(sums, random() * sum)
      made[k] = made[k] or request_of(k)
      sequence[i] = made[k]
   end
end

local function count_statuses()
   other = 0
   response = function(status)
      if status ~= 200 and status ~= 429 then other = other + 1 end
   end
end

function init(args)
   local keys = ({ tenants = TENANTS, hot = 1, over = 1 })[args[1]]
   if keys then
      for i = 1, keys do sequence[i] = request_of(i) end
   else
      draw_mixed()
   end
   -- Each round goes on elsewhere in the sequence, else all rounds would ask for the same few keys.
   position = tonumber(args[2]) * 37813 % #sequence
   if args[3] == "check" then count_statuses() end
end

function request()
   position = position % #sequence + 1
   return sequence[position]
end

local pace = tonumber(os.getenv("PACE") or "0")
if pace > 0 then
   -- Spread, so that the connections do not ask in step.
   function delay()
      return math.random(0, 2 * pace)
   end
end

local threads = {}

function setup(thread)
   table.insert(threads, thread)
end

-- Tab-separated: RESULT, duration (us), requests, p50, p99, p99.9 (us), statuses from 400 upwards, statuses other than
-- 200 and 429 (with `check`), socket errors.
function done(summary, latency)
   local errors, others = summary.errors, 0
   for _, thread in ipairs(threads) do others = others + (thread:get("other") or 0) end
   io.write(string.format("RESULT\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", summary.duration, summary.requests,
      latency:percentile(50), latency:percentile(99), latency:percentile(99.9), errors.status, others,
      errors.connect + errors.read + errors.write + errors.timeout))
end
