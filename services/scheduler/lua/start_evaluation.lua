-- Effect   the prompts of an evaluation enter their own lane, outside the window.
-- KEYS     7 prompts   8 evaluations
-- ARGV     args.plan (running); args.prompts list of {u uid, n sessions}; blobs: their Prompts
-- Returns  nothing.
-- I4       validation never occupies the window: its counters are apart.

if redis.call('HEXISTS', KEYS[8], args.plan.id) == 0 then return redis.error_reply('CHANGED evaluation ' .. args.plan.id .. ' is gone') end
for i, prompt in ipairs(args.prompts) do
  redis.call('HSET', KEYS[7], prompt.u, ARGV[5 + i])
  save(prompt.u, {k = 'v', q = i, o = -1, n = prompt.n, x = string.rep('0', prompt.n), b = -1, a = 0, f = 0, r = '', e = 0, g = 0,
    v = args.plan.id}, 'pending')
end
redis.call('HSET', KEYS[8], args.plan.id, cjson.encode(args.plan))
return done(0)
