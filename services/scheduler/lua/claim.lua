-- standalone: runs without the common head.
-- Effect   a new scheduler incarnation, unless one in another place leads; every older one is deposed from now on (I6).
-- KEYS     1 op:<id>   2 epoch:scheduler   3 leader
-- ARGV     1 how long the answer is remembered, s   2 place   3 how long it leads unless renewed, ms
-- Returns  {epoch as a string, '', 0}, or {'', place of the leader, how long it leads unless renewed, ms}.

local first_answer = redis.call('GET', KEYS[1])
if first_answer then return {first_answer, '', 0} end
local leader = redis.call('GET', KEYS[3])
if leader and leader ~= ARGV[2] then return {'', leader, redis.call('PTTL', KEYS[3])} end
local epoch = tostring(redis.call('INCR', KEYS[2]))
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[1], epoch, 'EX', ARGV[1])
return {epoch, '', 0}
