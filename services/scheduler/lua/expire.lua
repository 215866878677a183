-- Effect   running -> pending, or failed when the attempts are used up: leases that ended without a report.
-- KEYS     (common)
-- ARGV     args.attempts_max; args.leases list of {u uid, a attempt, w reason, f does it count as failed}
-- Returns  {expired: number}. A lease that meanwhile ended is skipped.
-- I8       version_begin stays; reported trajectories and partials stay.
-- I9       every lease ends: here, by a report, or by a return.

local expired, first = 0, nil
for _, lease in ipairs(args.leases) do
  local rec = load(lease.u)
  if rec and rec.s == 'running' and rec.a == lease.a then
    local has_failed = lease.f or string.find(rec.x, 'x', 1, true) ~= nil
    attempt_over(lease.u, rec, has_failed, args.attempts_max, lease.w)
    expired, first = expired + 1, first or lease
  end
end
if expired > 0 then
  emit('reissued', expired .. ' leases lost: ' .. first.w, {groups = expired}, {reason = first.w, uid = first.u})
end
return done({expired = expired})
