-- Effect   a checkpoint that contains `step` is durable: the groups of steps <= step leave the store.
-- KEYS     7 epoch:trainer   8 committed   9 prompts   10.. traj:<uid> of each of args.uids
-- ARGV     args.trainer_epoch; args.step; args.path; args.cut_id; args.uids, the committed groups of steps <= step
-- Returns  {removed: number}.
-- I5       nothing leaves the store before.
-- I6       only the newest trainer commits.

if tonumber(redis.call('GET', KEYS[7]) or '0') ~= args.trainer_epoch then
  return redis.error_reply('FENCED trainer epoch ' .. args.trainer_epoch .. ' is older; another trainer took over this run; stop this one')
end
if args.step > get('committed') then
  return redis.error_reply('REFUSED checkpoint of step ' .. args.step .. ' is ahead of committed step ' .. get('committed'))
end
local gone = 0
for n, uid in ipairs(args.uids) do
  local text = redis.call('HGET', KEYS[8], uid)
  local rec = text and cjson.decode(text)
  if rec and rec.t <= args.step then
    count(rec, 'committed', -1)
    redis.call('HDEL', KEYS[8], uid)
    redis.call('HDEL', KEYS[9], uid)
    redis.call('DEL', KEYS[9 + n])
    gone, touched = gone + 1, true
  end
end
if args.step > get('checkpoint') then
  set('checkpoint', args.step)
  set('cut_id', args.cut_id)
  emit('checkpoint', 'checkpoint of step ' .. args.step .. ' is durable', {step = args.step, groups_removed = gone}, {path = args.path})
end
return done({removed = gone})
