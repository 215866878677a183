-- Effect   a replica's session: joins under a new epoch, is refreshed, leaves, or is forgotten.
-- KEYS     7 replicas   8 replica_epochs
-- ARGV     args.replica; args.verb 'join', 'beat', 'leave' or 'forget'; args.epoch (of all but join); args.session the record;
--          args.text for the event of join and leave
-- Returns  {epoch}.
-- I6       a join fences the replica's older incarnations, of a forgotten session too: its epoch stays.

local epoch = tonumber(redis.call('HGET', KEYS[8], args.replica) or '0')
if args.verb == 'join' then
  epoch = redis.call('HINCRBY', KEYS[8], args.replica, 1)
  args.session.epoch = epoch
  emit('replica_joined', args.text, {epoch = epoch}, {replica = args.replica})
elseif args.epoch ~= epoch then
  return redis.error_reply('FENCED replica ' .. args.replica .. ' epoch ' .. args.epoch .. ' is older than ' .. epoch .. '; stop this one')
elseif args.verb == 'leave' then
  emit('replica_left', args.text, {epoch = epoch}, {replica = args.replica})
end
if args.verb == 'forget' then
  redis.call('HDEL', KEYS[7], args.replica)
else
  redis.call('HSET', KEYS[7], args.replica, cjson.encode(args.session))
end
return done({epoch = epoch})
