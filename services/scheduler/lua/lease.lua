-- Effect   pending -> running: the replica may work on these groups.
-- KEYS     7 replica_epochs
-- ARGV     args.replica, args.epoch of the replica; args.version of the weights it will begin with; args.uids
-- Returns  {leases: list of {u uid, a attempt, b version that began it, x marks}}.
-- I6       an older incarnation of the replica gets nothing.
-- I8       version_begin is the least version that may have drawn a token: later leases never make it younger.

if tonumber(redis.call('HGET', KEYS[7], args.replica) or '0') ~= args.epoch then
  return redis.error_reply('FENCED replica ' .. args.replica .. ' epoch ' .. args.epoch .. ' is not the newest; stop this one')
end
local leases = {}
for _, uid in ipairs(args.uids) do
  local rec = load(uid)
  if not rec or rec.s ~= 'pending' then return redis.error_reply('CHANGED ' .. uid .. ' is not pending') end
end
for i, uid in ipairs(args.uids) do
  local rec = load(uid)
  rec.a, rec.r, rec.e, rec.g = rec.a + 1, args.replica, args.epoch, now_ms
  if rec.b < 0 or args.version < rec.b then rec.b = args.version end
  save(uid, rec, 'running')
  leases[i] = {u = uid, a = rec.a, b = rec.b, x = rec.x}
end
return done({leases = leases})
