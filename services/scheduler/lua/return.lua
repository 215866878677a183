-- Effect   running -> pending: the replica hands leases back, with partial answers to continue.
-- KEYS     7 replica_epochs   8.. traj:<uid> of each of args.leases
-- ARGV     args.replica, args.epoch; args.reason; args.failed true when the attempt counts as failed;
--          args.attempts_max; args.leases list of {u uid, a attempt, p indices of partials}; blobs: the partials
-- Returns  {returned: number}.
-- I8       version_begin stays.

if tonumber(redis.call('HGET', KEYS[7], args.replica) or '0') ~= args.epoch then
  return redis.error_reply('FENCED replica ' .. args.replica .. ' epoch ' .. args.epoch .. ' is not the newest; stop this one')
end
local returned, blob = 0, 5
for n, lease in ipairs(args.leases) do
  local rec = load(lease.u)
  if rec and rec.s == 'running' and rec.r == args.replica and rec.e == args.epoch and rec.a == lease.a then
    for i, index in ipairs(lease.p) do
      if string.sub(rec.x, index + 1, index + 1) == '0' then
        redis.call('HSET', KEYS[7 + n], 'p' .. index, ARGV[blob + i])
      end
    end
    local failed = args.failed or string.find(rec.x, 'x', 1, true) ~= nil
    attempt_over(lease.u, rec, failed, args.attempts_max, args.failed and args.reason or rec.w or args.reason)
    returned = returned + 1
  end
  blob = blob + #lease.p
end
if returned > 0 then
  emit('reissued', returned .. ' groups handed back by ' .. args.replica .. ': ' .. args.reason, {groups = returned},
    {replica = args.replica, reason = args.reason})
end
return done({returned = returned})
