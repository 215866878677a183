-- Effect   consumed -> committed: the step is trained and its version published; its groups leave the window but not yet
--          the store. May ask for the evaluation of this version.
-- KEYS     7 epoch:trainer   8 committed   9 steps   10 evaluations
-- ARGV     args.trainer_epoch; args.step; args.uids of its batch; args.metrics a JSON text, kept as it is;
--          args.evaluation nil or a plan (see evaluations.py)
-- Returns  {fresh: false when the step was committed before}.
-- I3       a step's uids are written once: its ordinals are trained.
-- I5       payloads and trajectories stay until a checkpoint contains the step.
-- I6       only the newest trainer commits.

if tonumber(redis.call('GET', KEYS[7]) or '0') ~= args.trainer_epoch then
  return redis.error_reply('FENCED trainer epoch ' .. args.trainer_epoch .. ' is older; another trainer took over this run; stop this one')
end
local committed = get('committed')
if args.step <= committed then return done({fresh = false}) end
if args.step ~= committed + 1 then
  return redis.error_reply('REFUSED step ' .. args.step .. ' does not follow committed step ' .. committed)
end
local batch, lag_max, num_users = {}, 0, 0
for _, uid in ipairs(args.uids) do
  local rec = load(uid)
  if not rec or rec.s ~= 'consumed' or rec.t ~= args.step then return redis.error_reply('CHANGED ' .. uid .. ' is not consumed') end
end
if #args.uids == 0 then return redis.error_reply('REFUSED step ' .. args.step .. ' has no batch: sample it first') end
for place, uid in ipairs(args.uids) do
  local rec = load(uid)
  remove(uid, rec)
  count(rec, 'committed', 1)
  rec.s = 'committed'
  redis.call('HSET', KEYS[8], uid, cjson.encode(rec))
  lag_max = math.max(lag_max, args.step - 1 - rec.b)
  if rec.k == 'u' then num_users = num_users + 1 end
  batch[place] = {u = uid, b = rec.b}
end
redis.call('HSET', KEYS[9], args.step, cjson.encode(batch))
set('committed', args.step)
set('metrics_json', args.metrics)
if num_users > 0 then add('user_trained', num_users) end
if lag_max > get('lag_trained_max') then set('lag_trained_max', lag_max) end
if args.evaluation then redis.call('HSETNX', KEYS[10], args.evaluation.id, cjson.encode(args.evaluation)) end
emit('step', 'step ' .. args.step .. ' committed', args.metrics)
return done({fresh = true})
