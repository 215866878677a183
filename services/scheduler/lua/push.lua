-- Effect   admits prompts: first `users` from the users' queue, then dataset prompts; the cursor advances with them.
-- KEYS     7 prompts   8 queue
-- ARGV     args.users number; args.cursor ordinal of the first prompt; args.prompts list of {u uid, n group size};
--          args.window prompts that may be open; blobs: the Prompt of each of args.prompts
-- Returns  {uids of the users' prompts that entered}.
-- I3       the cursor moves in the script that admits, so an ordinal enters once and in order; another cursor is refused as CHANGED.
-- I4       checked again: more than the window admits is refused.

local cursor = get('cursor')
if cursor ~= args.cursor then
  return redis.error_reply('CHANGED cursor is at ' .. cursor .. ', prompts begin at ' .. args.cursor)
end
local occupied = 0
for _, state in ipairs({'pending', 'running', 'finished', 'failed', 'consumed'}) do
  occupied = occupied + tonumber(redis.call('HGET', KEYS[5], state) or '0')
end
if occupied + args.users + #args.prompts > args.window then
  return redis.error_reply('REFUSED window ' .. args.window .. ' has ' .. occupied .. ' prompts')
end
local seq, users = get('seq'), {}
local function enter(uid, kind, ordinal, size)
  seq = seq + 1
  save(uid, {k = kind, q = seq, o = ordinal, n = size, x = string.rep('0', size), b = -1, a = 0, f = 0, r = '', e = 0, g = 0}, 'pending')
end
for _ = 1, args.users do
  local item = redis.call('LPOP', KEYS[8])
  if not item then break end
  local user = cjson.decode(item)
  enter(user.u, 'u', -1, user.n)
  users[#users + 1] = user.u
end
for i, prompt in ipairs(args.prompts) do
  redis.call('HSET', KEYS[7], prompt.u, ARGV[5 + i])
  enter(prompt.u, 't', cursor + i - 1, prompt.n)
end
if #users > 0 then add('user_queued', -#users) end
if #args.prompts > 0 then add('cursor', #args.prompts) end
set('seq', seq)
return done({users = users})
