-- Effect   queues an evaluation.
-- KEYS     7 evaluations
-- ARGV     args.plan, without an id: it gets 'e<n>'
-- Returns  {id}.

add('evaluation_next', 1)
args.plan.id = 'e' .. get('evaluation_next')
redis.call('HSET', KEYS[7], args.plan.id, cjson.encode(args.plan))
return done({id = args.plan.id})
