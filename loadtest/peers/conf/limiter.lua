-- The limit of nginx-lua.conf: one EVALSHA for each request, on a connection from nginx's pool.

local redis = require "nginx.redis" -- Debian's name of resty.redis

local Limiter = {}
Limiter.__index = Limiter

-- Options: port of Redis, rate and capacity of each key, size of the pool, path of the script.
function Limiter.new(options)
   local file = assert(io.open(options.script))
   options.source = file:read("*a")
   file:close()
   return setmetatable(options, Limiter)
end

-- A connection, and the name of the script, which Redis is told once.
function Limiter:connect()
   local connection = redis:new()
   connection:set_timeout(1000)
   local ok, problem = connection:connect("127.0.0.1", self.port)
   if not ok then return nil, problem end
   if not self.sha then
      self.sha, problem = connection:script("LOAD", self.source)
      if not self.sha then return nil, problem end
   end
   return connection
end

-- What the script returns, or nil and what went wrong.
function Limiter:ask(key)
   local connection, problem = self:connect()
   if not connection then return nil, problem end
   local answer
   answer, problem = connection:evalsha(self.sha, 1, key, self.rate, self.capacity)
   if not answer then
      self.sha = nil -- a Redis that has started anew does not know the script
      return nil, problem
   end
   connection:set_keepalive(60000, self.pool)
   return answer
end

function Limiter:check()
   local tenant = ngx.var.http_x_api_key
   if not tenant then return ngx.exit(401) end
   local remaining, problem = self:ask("bucket:" .. tenant)
   if not remaining then
      -- Here a fault has to be seen; in production one would let the request pass.
      ngx.log(ngx.ERR, "Redis: ", problem)
      return ngx.exit(503)
   end
   ngx.header["X-RateLimit-Remaining"] = math.max(remaining, 0)
   if remaining < 0 then
      ngx.header["Retry-After"] = math.ceil(-remaining / 1000)
      return ngx.exit(429)
   end
end

return Limiter
