-- Head of every transition: the loader puts it in front of each other file of this folder.
--
-- KEYS  1 op:<id>   2 epoch:scheduler   3 meta   4 groups   5 occupancy   6 events   7.. the transition's own
-- ARGV  1 scheduler epoch   2 now, unix ms   3 how long the answer is remembered, s   4 revision decided on, '' = any
--       5 arguments, a JSON object   6.. blobs
-- Returns one JSON object: rev0 -> rev (of the ledger, before and after), what changed (set, del, meta, occ), the number
-- of events added, and the transition's answer `ans`. Refusals are error replies and change nothing: FENCED, REFUSED, CHANGED,
-- LOST, DEPOSED.
-- I1: an operation runs once; a repeat returns the first answer (rev0 = -1: the caller's mirror is to be read again).
-- I2: `save` and `remove` are the only writers of `groups` and change the counters with it.
-- I6: an older scheduler epoch changes nothing.

local first_answer = redis.call('GET', KEYS[1])
if first_answer then return first_answer end
local epoch = redis.call('GET', KEYS[2])
if not epoch then return redis.error_reply('LOST the store was emptied: it does not know scheduler epoch ' .. ARGV[1]) end
if epoch ~= ARGV[1] then
  return redis.error_reply('DEPOSED scheduler epoch ' .. ARGV[1] .. ' is not ' .. epoch .. '; another scheduler took over this run; stop this one')
end
local revision = tonumber(redis.call('HGET', KEYS[3], 'rev') or '0')
if ARGV[4] ~= '' and tonumber(ARGV[4]) ~= revision then
  return redis.error_reply('CHANGED ledger is at revision ' .. revision .. ', decided on ' .. ARGV[4])
end
local now_ms = tonumber(ARGV[2])
local args = cjson.decode(ARGV[5])
local changed, removed, fields, counters, num_events, touched = {}, {}, {}, {}, 0, false

local function count(rec, state, delta)
  local field = (rec.k == 'v' and 'validation:' or '') .. state
  counters[field] = redis.call('HINCRBY', KEYS[5], field, delta)
end

local function load(uid)
  local text = redis.call('HGET', KEYS[4], uid)
  return text and cjson.decode(text)
end

local function save(uid, rec, state)
  if rec.s ~= state then
    if rec.s then count(rec, rec.s, -1) end
    count(rec, state, 1)
    rec.s = state
  end
  redis.call('HSET', KEYS[4], uid, cjson.encode(rec))
  changed[uid] = rec
  touched = true
end

local function remove(uid, rec)
  count(rec, rec.s, -1)
  redis.call('HDEL', KEYS[4], uid)
  removed[#removed + 1] = uid
  touched = true
end

local function get(field)
  return tonumber(redis.call('HGET', KEYS[3], field) or '0')
end

local function set(field, value)
  redis.call('HSET', KEYS[3], field, value)
  fields[field] = value
  touched = true
end

local function add(field, delta)
  fields[field] = redis.call('HINCRBY', KEYS[3], field, delta)
  touched = true
end

-- An attempt ended without a whole group: issue the rest again, or give up. Partials and reported trajectories stay.
local function attempt_over(uid, rec, failed, attempts_max, reason)
  rec.x = string.gsub(rec.x, 'x', '0')
  rec.r, rec.e = '', 0
  if failed then rec.f = rec.f + 1 end
  if rec.f >= attempts_max then
    rec.w = reason
    save(uid, rec, 'failed')
  else
    save(uid, rec, 'pending')
    add('num_reissued', 1)
  end
end

-- `values` is a table, or a JSON text that is kept as it is (numbers to the last digit, NaN included).
local function emit(kind, text, values, labels, blob)
  if type(values) ~= 'string' then values = cjson.encode(values or {}) end
  redis.call('XADD', KEYS[6], 'MAXLEN', '~', 10000, '*', 'kind', kind, 'ms', now_ms, 'text', text,
    'values', values, 'labels', cjson.encode(labels or {}), 'blob', blob or '')
  num_events = num_events + 1
end

local function done(answer)
  local after = revision
  if touched then after = redis.call('HINCRBY', KEYS[3], 'rev', 1) end
  redis.call('SET', KEYS[1], cjson.encode({rev0 = -1, rev = -1, ans = answer}), 'EX', ARGV[3])
  return cjson.encode({rev0 = revision, rev = after, set = changed, del = removed, meta = fields, occ = counters,
    events = num_events, ans = answer})
end

