-- standalone: runs without the common head.
-- Effect   the scheduler goes on leading, or resigns; may be repeated. Needs no memory, so that a full server deposes nobody.
-- KEYS     1 epoch:scheduler   2 leader
-- ARGV     1 scheduler epoch   2 place   3 how long it leads unless renewed, ms; 0 = no longer
-- Returns  nothing.
-- I6       looked for also while nothing else is written: LOST and DEPOSED as in the common head.

local epoch = redis.call('GET', KEYS[1])
if not epoch then return redis.error_reply('LOST the store was emptied: it does not know scheduler epoch ' .. ARGV[1]) end
if epoch ~= ARGV[1] then
  return redis.error_reply('DEPOSED scheduler epoch ' .. ARGV[1] .. ' is not ' .. epoch .. '; another scheduler took over this run; stop this one')
end
if ARGV[3] == '0' then
  redis.call('DEL', KEYS[2])
elseif redis.call('PEXPIRE', KEYS[2], ARGV[3]) == 0 then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
return 0
