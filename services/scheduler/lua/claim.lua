-- standalone: runs without the common head.
-- Effect   a new scheduler incarnation; every older one is fenced from now on (I6).
-- KEYS     1 op:<id>   2 epoch:scheduler
-- ARGV     1 how long the answer is remembered, s
-- Returns  the epoch, as a string.

local first_answer = redis.call('GET', KEYS[1])
if first_answer then return first_answer end
local epoch = tostring(redis.call('INCR', KEYS[2]))
redis.call('SET', KEYS[1], epoch, 'EX', ARGV[1])
return epoch
