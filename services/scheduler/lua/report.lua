-- Effect   ends of trajectories, all of one call: stored, marked; a whole group is finished, a failed attempt is over.
-- KEYS     7 replica_epochs   8.. traj:<uid> of each of args.groups
-- ARGV     args.replica, args.epoch; args.attempts_max; args.groups list of {u uid, a attempt, t list of
--          {i index, n tokens, w reward, v least version of its tokens or nil, e error of a failed session or nil}}; blobs:
--          the trajectories in that order
-- Returns  {lost: uids no longer this replica's, accepted: trajectories that counted, finished: uids, failed: trajectories}.
-- I1       the first end of (uid, index) counts; a repeat is ignored.
-- I6       an older incarnation of the replica reports nothing.
-- I7       the prompt is not touched.
-- I8       version_begin is at most the version of any token, whatever the replica has done.

if tonumber(redis.call('HGET', KEYS[7], args.replica) or '0') ~= args.epoch then
  return redis.error_reply('FENCED replica ' .. args.replica .. ' epoch ' .. args.epoch .. ' is not the newest; stop this one')
end
local lost, finished, accepted, failed, tokens, blob = {}, {}, 0, 0, 0, 5

local function take(rec, key, t)
  blob = blob + 1
  local at = t.i + 1
  if string.sub(rec.x, at, at) ~= '0' then return end
  local mark = '1'
  if t.e and rec.k ~= 'v' then
    mark, rec.w, failed = 'x', t.e, failed + 1
  else
    redis.call('HSET', key, t.i, ARGV[blob])
    if t.v and t.v < rec.b then rec.b = t.v end
    if not t.e then
      rec.lo, rec.hi = math.min(rec.lo or t.w, t.w), math.max(rec.hi or t.w, t.w)
    end
    accepted, tokens = accepted + 1, tokens + t.n
  end
  redis.call('HDEL', key, 'p' .. t.i)
  rec.x = string.sub(rec.x, 1, at - 1) .. mark .. string.sub(rec.x, at + 1)
end

for n, group in ipairs(args.groups) do
  local uid, rec = group.u, load(group.u)
  if rec and rec.s == 'running' and rec.r == args.replica and rec.e == args.epoch and rec.a == group.a then
    for _, t in ipairs(group.t) do take(rec, KEYS[7 + n], t) end
    if string.find(rec.x, '0', 1, true) then
      save(uid, rec, 'running')
    elseif string.find(rec.x, 'x', 1, true) then
      attempt_over(uid, rec, true, args.attempts_max, rec.w)
    else
      rec.r, rec.e = '', 0
      save(uid, rec, 'finished')
      finished[#finished + 1] = uid
    end
  else
    blob = blob + #group.t
    local ended_here = rec and rec.a == group.a and rec.s ~= 'running'
    if not ended_here then lost[#lost + 1] = uid end
  end
end
if accepted > 0 then
  add('num_trajectories', accepted)
  add('num_tokens', tokens)
end
return done({lost = lost, accepted = accepted, finished = finished, failed = failed})
