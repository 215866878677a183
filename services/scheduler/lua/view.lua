-- standalone: runs without the common head.
-- Effect   none: one consistent snapshot for decisions.
-- KEYS     1 meta   2 groups   3 occupancy
-- Returns  the three hashes, flat.

return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}
