-- Effect   groups leave untrained, each with a reason; every one frees one place for admission.
-- KEYS     7 prompts   8 evicted   9.. traj:<uid> of each of args.groups
-- ARGV     args.groups list of {u uid, w reason}
-- Returns  {evicted: number}.
-- I3       the reason stays in the store for ever: `ledger verify` counts it.

for _, group in ipairs(args.groups) do
  local rec = load(group.u)
  if not rec or rec.k == 'v' or rec.s == 'consumed' then
    return redis.error_reply('CHANGED ' .. group.u .. ' cannot be evicted')
  end
end
local failed = 0
for n, group in ipairs(args.groups) do
  local rec = load(group.u)
  if rec.s == 'failed' then failed = failed + 1 end
  remove(group.u, rec)
  redis.call('HDEL', KEYS[7], group.u)
  redis.call('HSET', KEYS[8], group.u, group.w)
  redis.call('DEL', KEYS[8 + n])
  emit(rec.s == 'failed' and 'failed' or 'evicted', group.u .. ': ' .. group.w, {attempts = rec.a, ordinal = rec.o},
    {uid = group.u, reason = group.w})
end
add('num_evicted', #args.groups)
if failed > 0 then add('num_failed', failed) end
return done({evicted = #args.groups})
