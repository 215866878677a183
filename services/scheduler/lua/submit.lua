-- Effect   queues users' prompts; they enter the window before the next dataset prompt, in this order.
-- KEYS     7 prompts   8 queue
-- ARGV     args.first number of the first prompt; args.prompts list of {u uid, n group size}; blobs: their Prompts
-- Returns  {uids}.
-- I3       the number of the first prompt must be the next one: uids are given once.

local first = get('user_next')
if first ~= args.first then
  return redis.error_reply('CHANGED next user prompt is ' .. first .. ', not ' .. args.first)
end
local uids = {}
for i, prompt in ipairs(args.prompts) do
  redis.call('HSET', KEYS[7], prompt.u, ARGV[5 + i])
  redis.call('RPUSH', KEYS[8], cjson.encode({u = prompt.u, n = prompt.n}))
  uids[i] = prompt.u
end
add('user_next', #uids)
add('user_queued', #uids)
return done({uids = uids})
