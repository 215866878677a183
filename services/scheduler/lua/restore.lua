-- Effect   puts the ledger back to a cut: all that the run has in the store is replaced by the snapshot of that cut.
-- KEYS     7 prompts   8 committed   9 steps   10 evicted   11 evaluations   12 results   13 queue
--          14.. traj:<uid> of every group that is there or comes back
-- ARGV     args.step; args.cut_id; args.meta fields; args.groups uid -> record; args.hashes list of {k place in KEYS,
--          f fields}; args.queued number; blobs: the values of args.hashes in that order, then the items of the queue
-- Returns  {groups: number}. The mirror does not follow: the caller reads it anew.
-- I2       the counters are counted anew with the groups.
-- I6       epochs, sessions and remembered answers stay: a fenced writer stays fenced.

for n = 7, #KEYS do redis.call('DEL', KEYS[n]) end
local evaluation_next = get('evaluation_next')
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
redis.call('HSET', KEYS[3], 'rev', revision)
for field, value in pairs(args.meta) do set(field, value) end
if evaluation_next > get('evaluation_next') then set('evaluation_next', evaluation_next) end -- an id names one evaluation for ever
set('committed', args.step)
set('checkpoint', args.step)
set('cut_id', args.cut_id)
local num_groups = 0
for uid, rec in pairs(args.groups) do
  local state = rec.s
  rec.s = nil
  save(uid, rec, state)
  num_groups = num_groups + 1
end
local blob = 5
for _, hash in ipairs(args.hashes) do
  for _, field in ipairs(hash.f) do
    blob = blob + 1
    redis.call('HSET', KEYS[hash.k], field, ARGV[blob])
  end
end
for _ = 1, args.queued do
  blob = blob + 1
  redis.call('RPUSH', KEYS[13], ARGV[blob])
end
emit('restored', 'the ledger is back at ' .. args.cut_id .. ': ' .. num_groups .. ' open groups',
  {step = args.step, groups = num_groups}, {cut_id = args.cut_id})
return done({groups = num_groups})
