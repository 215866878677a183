-- Effect   sets fields of the run (window, pause_reason, phase, ...) and tells it.
-- KEYS     (common)
-- ARGV     args.fields {name: value}; args.event nil or {kind, text, values, labels}
-- Returns  nothing.

for field, value in pairs(args.fields) do set(field, value) end
if args.event then emit(args.event.kind, args.event.text, args.event.values, args.event.labels) end
return done(0)
