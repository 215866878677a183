-- Effect   a new trainer incarnation that resumes after step k: groups of later steps are finished again.
-- KEYS     7 epoch:trainer   8 committed   9 steps   10 evaluations   11 results
-- ARGV     args.resume = k; args.cut_id of its checkpoint; args.epoch_floor below the new epoch; args.total_steps; args.address; args.finished uids consumed by steps > k; args.trained
--          uids consumed by steps <= k whose commit was lost; args.steps numbers > k to forget; args.evaluations ids of
--          evaluations of steps > k to forget; args.ordinal_first nil or the ordinal an empty store begins with;
--          args.evaluation nil or a plan (see evaluations.py)
-- Returns  {epoch, event_id: newest event before, reopened: number}.
-- I5       records, payloads and trajectories of re-opened groups are as they were.
-- I6       every older trainer is fenced.

if args.resume < get('checkpoint') then
  return redis.error_reply('REFUSED resume step ' .. args.resume .. ' is older than checkpoint ' .. get('checkpoint'))
end
local epoch = math.max(tonumber(redis.call('GET', KEYS[7]) or '0'), args.epoch_floor) + 1
redis.call('SET', KEYS[7], epoch)
local newest = redis.call('XREVRANGE', KEYS[6], '+', '-', 'COUNT', 1)
local event_id = newest[1] and newest[1][1] or '0-0'

-- A group that a step has taken: in `groups` while consumed, in `committed` afterwards.
local function taken(uid)
  local rec = load(uid)
  if rec then return rec end
  rec = cjson.decode(redis.call('HGET', KEYS[8], uid))
  redis.call('HDEL', KEYS[8], uid)
  if rec.k == 'u' then add('user_trained', -1) end
  return rec
end

for _, uid in ipairs(args.finished) do
  local rec = taken(uid)
  rec.t, rec.p = 0, 0
  save(uid, rec, 'finished')
end
local trained = {}
for _, uid in ipairs(args.trained) do
  local rec = load(uid)
  remove(uid, rec)
  count(rec, 'committed', 1)
  rec.s = 'committed'
  redis.call('HSET', KEYS[8], uid, cjson.encode(rec))
  if rec.k == 'u' then add('user_trained', 1) end
  local step = tostring(rec.t)
  trained[step] = trained[step] or {}
  table.insert(trained[step], {u = uid, b = rec.b})
end
for step, batch in pairs(trained) do redis.call('HSET', KEYS[9], step, cjson.encode(batch)) end
for _, step in ipairs(args.steps) do redis.call('HDEL', KEYS[9], step) end
for _, id in ipairs(args.evaluations) do
  redis.call('HDEL', KEYS[10], id)
  redis.call('HDEL', KEYS[11], id)
end
if args.ordinal_first then
  set('cursor', args.ordinal_first)
  set('ordinal_first', args.ordinal_first)
end
if args.evaluation then redis.call('HSETNX', KEYS[10], args.evaluation.id, cjson.encode(args.evaluation)) end
set('trainer_epoch', epoch)
set('trainer_address', args.address)
set('total_steps', args.total_steps)
set('committed', args.resume)
if args.resume > get('checkpoint') then
  set('checkpoint', args.resume)
  set('cut_id', args.cut_id)
end
emit('trainer_opened', 'trainer ' .. epoch .. ' resumes after step ' .. args.resume,
  {trainer_epoch = epoch, resume_step = args.resume, groups_reopened = #args.finished}, {address = args.address})
return done({epoch = epoch, event_id = event_id, reopened = #args.finished})
