-- Effect   finished -> consumed: the batch of a step, remembered until its commit.
-- KEYS     7 epoch:trainer
-- ARGV     args.trainer_epoch; args.step; args.uids in the batch's order
-- Returns  nothing.
-- I6       only the newest trainer consumes.

if tonumber(redis.call('GET', KEYS[7]) or '0') ~= args.trainer_epoch then
  return redis.error_reply('FENCED trainer epoch ' .. args.trainer_epoch .. ' is older; another trainer took over this run; stop this one')
end
if get('committed') + 1 ~= args.step then
  return redis.error_reply('REFUSED step ' .. args.step .. ' does not follow committed step ' .. get('committed'))
end
if tonumber(redis.call('HGET', KEYS[5], 'consumed') or '0') ~= 0 then return redis.error_reply('CHANGED a batch is consumed already') end
for _, uid in ipairs(args.uids) do
  local rec = load(uid)
  if not rec or rec.s ~= 'finished' then return redis.error_reply('CHANGED ' .. uid .. ' is not finished') end
end
for place, uid in ipairs(args.uids) do
  local rec = load(uid)
  rec.t, rec.p = args.step, place
  save(uid, rec, 'consumed')
end
return done(0)
