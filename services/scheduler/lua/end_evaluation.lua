-- Effect   an evaluation is over: its groups leave, its result (if any) stays and is told.
-- KEYS     7 prompts   8 evaluations   9 results   10.. traj:<uid> of each of args.uids
-- ARGV     args.id; args.uids, all of its groups; args.text, args.values for the event;
--          blob (only with a result): the Evaluation
-- Returns  nothing.

for n, uid in ipairs(args.uids) do
  local rec = load(uid)
  if rec then remove(uid, rec) end
  redis.call('HDEL', KEYS[7], uid)
  redis.call('DEL', KEYS[9 + n])
end
redis.call('HDEL', KEYS[8], args.id)
if ARGV[6] then
  redis.call('HSET', KEYS[9], args.id, ARGV[6])
  set('last_evaluation', args.id)
  emit('evaluation', args.text, args.values, {id = args.id}, ARGV[6])
end
return done(0)
