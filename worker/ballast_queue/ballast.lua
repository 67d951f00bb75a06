#!lua name=ballast1
-- The transitions of the queue. Each function is atomic. It moves items and checks tokens, and decides no policy.
--
-- Schema 1. The number is part of the name of every function, and not of the keys. Functions of two schemas would change the
-- same keys, so they cannot run beside each other. Each change must therefore serve the workers of older versions: the
-- positions of KEYS, ARGV and values in replies stay, and further ones come last and may be missing. A change that cannot do
-- this needs other names of the keys too, which begins with an empty queue.
--
-- Each change of this file increments REVISION. An administrator that connects replaces a lower revision and leaves a higher
-- one. Workers only call the functions.
--
-- The keys of a queue, all in one hash slot. `keys.py` builds them, and callers pass them in KEYS:
--   ballast:{<queue>}:inbox     stream   entries of submitters: item, job, tenant, priority, deadline, end, lines
--   ballast:{<queue>}:inbox:<t> stream   entries of a submitter that may write for tenant t only
--   ballast:{<queue>}:shortened stream   what is left of entries of `inbox` with more than MAX_FIELDS, under their ids, until
--                                        their refusal is stored: see `shorten`
--   ballast:{<queue>}:shortened:<t> stream   the same for the inbox of tenant t
--   ballast:{<queue>}:intake    string   the worker that reads the inbox (a short lock that only saves work)
--   ballast:{<queue>}:forecast  string   when a worker began to forecast deadlines; exists for a short time
--   ballast:{<queue>}:settings  hash     json, owner, rank, created, generation, when the owner last renewed them, when
--                                        they were last applied, and the numbers that these functions read
--   ballast:{<queue>}:declared  zset     tenant -> when settings in force last declared it, for the last MAX_DECLARED tenants
--   ballast:{<queue>}:totals    hash     sums over the jobs below (waiting, leased, ..., dead), jobs:<state>, `at_risk`,
--                                        `sequence` (of jobs) and `token` (the last fencing token, see `next_token`).
--                                        `unclaimable` counts the waiting items of jobs that are paused, unserved or
--                                        ending, and the items that are set aside in other jobs with a reason for it.
--                                        `unclaimable_at_risk` counts the jobs at risk that are paused, unserved or
--                                        ending. `timers_at` is when timers ran last, and `spared_at` when they last ran
--                                        after a gap, in milliseconds: see `postpone`
--   ballast:{<queue>}:jobs      zset     job id -> sequence
--   ballast:{<queue>}:ready     zset     rank -> 0, for jobs with claimable items; a rank sorts as
--                                        <1000 - priority>|<tenant>|<deadline>|<sequence>|<job id>
--   ballast:{<queue>}:groups    set      <1000 - priority>|<tenant>| of the ranks in `ready`
--   ballast:{<queue>}:held      hash     tenant -> items under lease
--   ballast:{<queue>}:active    zset     job id -> deadline (inf: none), for jobs that are not over
--   ballast:{<queue>}:backlog   zset     job id -> created, for running jobs with waiting items
--   ballast:{<queue>}:timers    zset     <kind>:<job id> -> when it is due: lease (no later than the earliest expiry),
--                                        wake (the earliest backoff), deadline, sweep (an ending job's waiting items),
--                                        abandon (a job that is paused or still open, some time after its last change,
--                                        or that is unserved for this time),
--                                        forget (the end of the retention of results). A timer whose work is not
--                                        finished moves behind all that are due, so that they take turns
--   ballast:{<queue>}:keys      hash     <tenant>\n<idempotency key> -> job id
--   ballast:{<queue>}:service   hash     tenant -> service charged so far; `` -> the level of tenants without an entry
--   ballast:{<queue>}:workers   zset     worker id -> when its status expires
--   ballast:{<queue>}:statuses  hash     worker id -> JSON of its status
-- The keys of a job, ballast:{<queue>}:job:<id> with a suffix:
--   (nothing)                   hash     the record: FIELDS below; and `digest`, `<lines> <SHA-256>` of the submitted lines
--   :items                      hash     index -> custom_id as JSON \n line; `=<token>` if succeeded, `!` if dropped
--   :live                       hash     index -> <token>:<attempts>:<worker> of a leased item; token 0: it waits again.
--                                        If the claim took an item that was set aside, `*` and the number of its model
--                                        follow the attempts
--   :returned                   zset     index -> index, claimed before the items from `next` on. An item that came back
--                                        because no model of its worker has its name is set aside: its score is the index
--                                        plus SET_ASIDE times the number of the name (`Claimed.model_number`)
--   :delayed                    zset     index -> when its backoff ends
--   :leases                     zset     index -> when its lease expires
--   :prefixes                   hash     index -> JSON of the tokens that an attempt generated before it ended
--   :dead                       hash     index -> attempts \n result's stream id \n token \n JSON of the dead letter
--   :results                    stream   i: index (or -), r: JSON of the result; in order of completion
--   :ids                        set      custom ids, until the job is closed
-- The items from `next` to `stored` - 1 wait and have an entry only in :items.
--
-- A user of the queue can write anything into these keys, and calls the functions with any arguments. Each call of a function
-- blocks all users of the server, and no command ends one that has written. So no value and no argument lifts a limit: each
-- loop has one that is in this file, or goes through a list that the caller sent or one command returned. Numbers come from
-- `number`, `whole` and `count`, and a text has a most length before it is parsed. A value that is none of Ballast is left out,
-- or it is an error of its job.

local REVISION = 23

local FIELDS = {
  'id', 'tenant', 'state', 'rank', 'source', 'key', 'ending', 'reason', 'outlook', 'because',
  'priority', 'created', 'deadline', 'finished', 'closed', 'lines', 'stored', 'next', 'delayed', 'prefix_key',
  'asked_out', 'unbounded', 'appraised', 'tokens_in', 'tokens_out', 'total', 'waiting', 'leased', 'succeeded', 'failed', 'cancelled', 'expired', 'dead',
  'unclaimable', 'unclaimable_at_risk', 'set_aside', 'lost',
}
local NUM_TEXTS = 10 -- the first fields are text, the rest numbers
local NUM_READ = 33 -- the first fields are in the replies of `read`: older workers expect no others
local NUM_HEAD_READ = 13 -- and the first fields of HEAD are in the replies of `heads`
local HEAD = {
  'tenant', 'priority', 'created', 'deadline', 'waiting', 'delayed', 'leased', 'prefix_key',
  'stored', 'asked_out', 'unbounded', 'succeeded', 'tokens_out',
}
local SUMMED = {
  'total', 'waiting', 'leased', 'succeeded', 'failed', 'cancelled', 'expired', 'dead',
  'unclaimable', 'unclaimable_at_risk',
}
local COUNTED = {lines = true, stored = true, next = true, delayed = true, set_aside = true, lost = true}
for i = 1, #SUMMED do COUNTED[SUMMED[i]] = true end -- `ipairs` does not exist while the library loads
local OF_ENTRY = {item = true, job = true, tenant = true, priority = true, deadline = true, ['end'] = true, lines = true}
local RUNS = {validating = true, in_progress = true}
local OVER = {completed = true, failed = true, expired = true, cancelled = true}
local ENDINGS = {[''] = true, cancelled = true, expired = true}
local OF_TOTALS = { -- in the reply of `stats`, with those of SUMMED
  'at_risk', 'jobs:validating', 'jobs:in_progress', 'jobs:paused', 'jobs:finalizing', 'jobs:cancelling',
  'jobs:completed', 'jobs:failed', 'jobs:expired', 'jobs:cancelled',
}
for i = 1, #SUMMED do OF_TOTALS[#OF_TOTALS + 1] = SUMMED[i] end
local MAX_PAGE_BYTES = 8 * 1024 * 1024
local MAX_FIELDS = 64 -- of an entry: a longer one is refused. Each field takes FIELD_BYTES to read, beside its texts
local FIELD_BYTES = 64
local MAX_STATUS_BYTES, MAX_STATUSES, MAX_STATUSES_BYTES = 128 * 1024, 5000, 2 * 1024 * 1024
local MAX_DECLARED = 2000
local MOST_ITEMS = 1000 -- of one call
local MOST_ENTRIES = 10000 -- of inboxes or results, in one call
local MOST_GROUPS, MOST_FIELDS = 10000, 10000 -- in one reply
local MOST_LOST = 1000 -- items of a job whose lines are lost, with a result. A user can make a record count any number of them
local MOST_NUMBER, MOST_WHOLE, MOST_MODEL = 1e30, 9007199254740992, 1048576
local MOST_TEXT, MOST_RECORD, MOST_NAME, MOST_WORKER = 4096, 65536, 2048, 512 -- bytes
local MOST_MEMORY = 1.2 -- times maxmemory: above it, a server leaves the items where they are
local UNSERVED = 'no worker serves the model that its items name' -- the reason of a job of which no item is work
local PARTLY_UNSERVED = 'no worker serves the model that some of its items name' -- some are set aside
local SET_ASIDE = 4294967296 -- 2^32: more than the index of any item. The sums below 2^53 are exact
local RENEWAL_SECONDS = 300 -- after this time without renewal, settings give way

-- redis.call does not exist while the library loads.
local function call(...)
  return redis.call(...)
end

-- This order never changes, because workers of older versions send these keys, at least the first 21. A further key comes
-- last, and is nil for such workers.
local function bind(keys)
  return {
    totals = keys[1], jobs = keys[2], ready = keys[3], backlog = keys[4], timers = keys[5], settings = keys[6],
    keys = keys[7], inbox = keys[8],
    groups = keys[9], active = keys[10], held = keys[11],
    job = keys[12], items = keys[13], live = keys[14], returned = keys[15], delayed = keys[16], leases = keys[17],
    prefixes = keys[18], dead = keys[19], results = keys[20], ids = keys[21], shortened = keys[22],
  }
end

-- Returns every `step`th value of a list, from position `first`.
local function every(list, first, step)
  local found = {}
  for i = first, #list, step do found[#found + 1] = list[i] end
  return found
end

local function clock()
  local time = call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- Returns the number that a text is, or nil: also for `nan`, `inf`, and numbers that nothing here counts.
local function number(text)
  local found = tonumber(text)
  return found and found > -MOST_NUMBER and found < MOST_NUMBER and found or nil
end

-- Returns the whole number that a text is, or nil.
local function whole(text)
  local found = number(text)
  return found and found == math.floor(found) and math.abs(found) <= MOST_WHOLE and found or nil
end

-- Returns the number in an argument as one from 0 to `most`.
local function count(text, most)
  return math.max(0, math.min(math.floor(number(text) or 0), most))
end

local function milliseconds(seconds)
  return math.max(1, count(1000 * (number(seconds) or 0), 86400000))
end

-- Returns whether a text or number can be the index of an item.
local function is_index(index)
  local text = tostring(index)
  return #text <= 10 and string.find(text, '^%d+$') ~= nil
end

-- Returns fields and values of a hash: all of up to MOST_FIELDS fields, and some of more. Some versions of Redis count a field
-- and its value as two.
local function pairs_of(key)
  return call('HSCAN', key, 0, 'COUNT', 2 * MOST_FIELDS)[2]
end

local function setting(k, name, default)
  return number(call('HGET', k.settings, name)) or default
end

-- The record of a job: load it, change it, save it. Only save_job updates the indexes and sums that depend on it.

local function load_job(k)
  local values = call('HMGET', k.job, unpack(FIELDS))
  if not values[1] then return nil end
  local job, was = {}, {}
  for i, field in ipairs(FIELDS) do
    local value = values[i]
    if i > NUM_TEXTS then
      value = not value and 0 or (COUNTED[field] and whole or number)(value)
    else
      value = value or ''
      if #value > MOST_TEXT then error('a record has a text that is too long') end
    end
    job[field], was[field] = value, value
  end
  if not ENDINGS[job.ending] then error('a record has an ending that is none') end
  job.was = was
  return job
end

local function group_of(rank)
  return string.match(rank, '^%d+|[^|]*|')
end

local function require_numbers(job, fields, first)
  for i = first, #fields do
    if not job[fields[i]] then error('a record has a number that is none') end
  end
end

local function require_rank(job)
  if not group_of(job.rank) then error('a record has a rank that is none') end
end

-- Raises an error if the record of a job lacks a value without which a function would fail after its first write.
local function require_readable(job)
  require_numbers(job, FIELDS, NUM_TEXTS + 1)
  require_rank(job)
end

-- Loads the record of a job for a function that moves its items. Raises an error as `require_readable` does, and needs fewer
-- values: a job that is cancelled can end without the others.
local function load_counted(k)
  local job = load_job(k)
  if job then
    require_numbers(job, SUMMED, 1)
    require_numbers(job, {'stored', 'next', 'delayed', 'tokens_in', 'tokens_out', 'set_aside', 'lost'}, 1)
    if job.ending ~= 'cancelled' then
      require_numbers(job, {'created', 'deadline'}, 1)
      require_rank(job)
    end
  end
  return job
end

local function is_ready(job)
  return RUNS[job.state] == true and job.waiting > job.delayed
end

local function is_backlog(job)
  return RUNS[job.state] and job.waiting > 0
end

-- The state is '' before the job is opened.
local function is_active(job)
  return job.state ~= '' and not OVER[job.state]
end

-- Items of such a job came back because of their model, and none has run since; or all that wait are set aside.
local function is_unserved(job)
  return job.reason == UNSERVED
end

-- Items of such a job came back because of their model, and some of them are set aside, or no item has run since.
local function has_unserved(job)
  return is_unserved(job) or job.reason == PARTLY_UNSERVED
end

-- Returns the number of the model for which an item in :returned is set aside; 0 for another item, and without a score.
local function model_of(score)
  return math.floor((tonumber(score) or 0) / SET_ASIDE)
end

local function forget_unserved(job)
  if has_unserved(job) then job.reason = '' end
end

-- An item of the job runs. `model` is the number of its model if it was set aside: a worker serves the other items of this
-- number, too. 0 stands for an item that was not set aside.
local function note_served(k, job, model)
  if not has_unserved(job) then return end
  local is_served = job.set_aside == 0
  if model > 0 and not is_served then
    if not job.aside then -- no call changes it before its last item
      local first = call('ZRANGE', k.returned, SET_ASIDE, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
      local last = call('ZRANGE', k.returned, -1, -1, 'WITHSCORES')
      job.aside = {model_of(first[2]), model_of(last[2])}
    end
    is_served = job.aside[1] == model and job.aside[2] == model
  end
  job.reason = is_served and '' or PARTLY_UNSERVED
end

-- More workers would not serve any waiting item of such a job.
local function is_unclaimable(job)
  return not RUNS[job.state] or is_unserved(job)
end

-- Such a job ends if nothing in it changes for a long time.
local function is_open(job)
  return is_active(job) and job.ending == '' and (job.state == 'paused' or job.closed == 0 or is_unserved(job))
end

local function num_at_risk(job)
  local is_told = job.outlook == 'at_risk' or job.outlook == 'no'
  return is_told and is_active(job) and job.ending == '' and 1 or 0
end

local function set_ready(k, rank, is_now)
  local group = group_of(rank)
  if is_now then
    call('ZADD', k.ready, 0, rank)
    call('SADD', k.groups, group)
    return
  end
  call('ZREM', k.ready, rank)
  local left = call('ZRANGE', k.ready, '[' .. group, '(' .. group .. '\255', 'BYLEX', 'LIMIT', 0, 1)
  if #left == 0 then call('SREM', k.groups, group) end
end

local function save_job(k, job)
  local was, changed = job.was, {}
  -- Fields, so that the totals change by what they count of this job: of a job that an older version paused, nothing yet.
  local is_part = job.reason == PARTLY_UNSERVED
  job.unclaimable = is_unclaimable(job) and job.waiting or is_part and job.set_aside or 0
  job.unclaimable_at_risk = is_unclaimable(job) and num_at_risk(job) or 0
  for _, field in ipairs(FIELDS) do
    if job[field] ~= was[field] then
      changed[#changed + 1] = field
      changed[#changed + 1] = job[field]
    end
  end
  if #changed == 0 then return end
  call('HSET', k.job, unpack(changed))
  for _, field in ipairs(SUMMED) do
    local delta = job[field] - was[field]
    if delta ~= 0 then call('HINCRBY', k.totals, field, delta) end
  end
  if job.state ~= was.state then
    if was.state ~= '' then call('HINCRBY', k.totals, 'jobs:' .. was.state, -1) end
    call('HINCRBY', k.totals, 'jobs:' .. job.state, 1)
  end
  if job.leased ~= was.leased and call('HINCRBY', k.held, job.tenant, job.leased - was.leased) == 0 then
    call('HDEL', k.held, job.tenant)
  end
  if is_open(job) then
    -- Workers try an unserved job again and again. These claims are no change of it.
    if job.state ~= was.state or not (is_unserved(job) and is_unserved(was)) then
      call('ZADD', k.timers, clock() + setting(k, 'abandoned_seconds', 2592000), 'abandon:' .. job.id)
    end
  elseif is_open(was) then
    call('ZREM', k.timers, 'abandon:' .. job.id)
  end
  local risk = num_at_risk(job) - num_at_risk(was)
  if risk ~= 0 then call('HINCRBY', k.totals, 'at_risk', risk) end
  local active, ready, backlog = is_active(job), is_ready(job), is_backlog(job)
  if active and not is_active(was) then call('ZADD', k.active, job.deadline > 0 and job.deadline or 'inf', job.id) end
  if not active and is_active(was) then call('ZREM', k.active, job.id) end
  if ready ~= is_ready(was) then set_ready(k, job.rank, ready) end
  if backlog and not is_backlog(was) then call('ZADD', k.backlog, job.created, job.id) end
  if not backlog and is_backlog(was) then call('ZREM', k.backlog, job.id) end
end

-- Ends a job whose last item is over, and notes if only items are left whose model no worker serves.
local function settle(k, job, now)
  if has_unserved(job) and job.leased == 0 and job.waiting > 0 and job.waiting == job.set_aside then job.reason = UNSERVED end
  if job.closed == 0 or job.waiting > 0 or job.leased > 0 or OVER[job.state] then return end
  if job.ending ~= '' then
    job.state = job.ending
  elseif job.stored == 0 then
    job.state = 'failed'
    job.reason = job.total == 0 and 'the job was closed without a line'
      or 'none of its ' .. job.total .. ' lines was accepted: each error result states the reason'
  else
    job.state = 'completed'
    forget_unserved(job)
  end
  job.finished = now
  call('UNLINK', k.live, k.returned, k.delayed, k.leases, k.prefixes, k.ids)
  call('ZREM', k.timers, 'lease:' .. job.id, 'wake:' .. job.id, 'deadline:' .. job.id, 'sweep:' .. job.id)
  call('ZADD', k.timers, now + setting(k, 'results_seconds', 604800), 'forget:' .. job.id)
end

-- Items

local function publish(k, index, json)
  return call('XADD', k.results, '*', 'i', index, 'r', json)
end

local function error_result(custom_id, status, error, worker)
  return '{"version":1,"custom_id":' .. custom_id .. ',"status_code":' .. status .. ',"body":null,"error":' .. error
    .. ',"tokens_in":0,"tokens_out":0,"worker":' .. cjson.encode(worker) .. '}'
end

local function error_of(code, message)
  return '{"code":' .. cjson.encode(code) .. ',"message":' .. cjson.encode(message) .. '}'
end

-- Returns the custom id as JSON, and the bytes that the server had to read for it. An item whose line is lost gets another
-- name: without one it could never end, and neither could its job. Results contain the name as it is, so it must be JSON.
-- Returns nil if the item gets no result: the job has lost more than MOST_LOST lines, or its index is none.
local function custom_id_of(k, job, index)
  local item = is_index(index) and call('HGET', k.items, index)
  if not item then
    job.lost = job.lost + 1
    if job.lost > MOST_LOST or not is_index(index) then return nil, 0 end
    item = ''
  end
  -- A decoder takes 40 times the memory of its text, beyond maxmemory.
  local name = string.match(string.sub(item, 1, MOST_NAME), '^("[^%z\1-\31]*")\n')
  local is_json, found = pcall(cjson.decode, '[' .. (name or '') .. ']')
  local is_name = is_json and #found == 1 and type(found[1]) == 'string'
  return is_name and name or '"line:lost-' .. index .. '"', #item
end

-- Returns token, attempts and worker of an entry in :live, and the model for which the item was set aside, or 0. The token is
-- '0' if the item waits, and also if the entry cannot be read. One pattern for all would try each way to divide a long row of
-- digits.
local function parse_live(value)
  local first = value and string.find(value, ':', 1, true)
  local second = first and string.find(value, ':', first + 1, true)
  if not second or first > 20 or second - first > 20 then return '0', 0, '', 0 end
  local token = string.match(string.sub(value, 1, first - 1), '^%d+$')
  local attempts, model = string.match(string.sub(value, first + 1, second - 1), '^(%d+)%*?(%d*)$')
  if not token or not attempts or #attempts > 9 then return '0', 0, '', 0 end
  return token, tonumber(attempts), string.sub(value, second + 1, second + MOST_WORKER), tonumber(model) or 0
end

local function live_of(k, index)
  return parse_live(is_index(index) and call('HGET', k.live, index))
end

local function end_lease(k, job, index)
  call('ZREM', k.leases, index)
  job.leased = job.leased - 1
end

local function forget_item(k, index)
  call('HDEL', k.live, index)
  call('HDEL', k.prefixes, index)
end

-- Ends an item whose job ends first. Returns the bytes that were read.
local function let_go(k, job, index)
  local message = 'the job was cancelled before this request finished'
  if job.ending == 'expired' then
    local is_late = job.deadline > 0 and clock() >= job.deadline
    local why = is_late and 'the deadline of the job passed' or string.match(job.reason, '^[^,]*')
    message = why .. ' before this request finished'
  end
  local status = job.ending == 'expired' and 408 or 499
  local custom_id, bytes = custom_id_of(k, job, index)
  if custom_id then
    publish(k, index, error_result(custom_id, status, error_of(job.ending, message), ''))
    call('HSET', k.items, index, '!')
  end
  forget_item(k, index)
  job[job.ending] = job[job.ending] + 1
  return bytes
end

-- Makes an item a dead letter and keeps its line for a redrive. `letter` has token, attempts, code, message, worker,
-- is_retryable (false: no attempt can serve the item) and status. Returns the bytes that were read.
local function bury(k, job, index, letter, now)
  local custom_id, bytes = custom_id_of(k, job, index)
  if not custom_id then
    forget_item(k, index)
    job.failed = job.failed + 1
    return bytes
  end
  local error = error_of(letter.code, letter.message)
  local id = publish(k, index, error_result(custom_id, letter.status, error, letter.worker))
  local json = '{"version":1,"job_id":' .. cjson.encode(job.id) .. ',"index":' .. index .. ',"custom_id":' .. custom_id
    .. ',"attempts":' .. letter.attempts .. ',"code":' .. cjson.encode(letter.code)
    .. ',"message":' .. cjson.encode(letter.message) .. ',"worker":' .. cjson.encode(letter.worker)
    .. ',"is_retryable":' .. tostring(letter.is_retryable) .. ',"at":' .. string.format('%.6f', now) .. '}'
  call('HSET', k.dead, index, letter.attempts .. '\n' .. id .. '\n' .. letter.token .. '\n' .. json)
  forget_item(k, index)
  job.failed = job.failed + 1
  job.dead = job.dead + 1
  return bytes
end

-- Makes an item wait again, with `spent` attempts, until `ready_at` (0: it is claimable at once). With the number of a model,
-- the item is set aside.
local function release(k, job, index, spent, ready_at, model)
  if spent > 0 then
    call('HSET', k.live, index, '0:' .. spent .. ':')
  else
    call('HDEL', k.live, index)
  end
  if ready_at > 0 then
    call('ZADD', k.delayed, ready_at, index)
    call('ZADD', k.timers, 'LT', ready_at, 'wake:' .. job.id)
    job.delayed = job.delayed + 1
  elseif model and model > 0 then
    call('ZADD', k.returned, string.format('%.0f', model * SET_ASIDE + index), index)
    job.set_aside = job.set_aside + 1
  else
    call('ZADD', k.returned, index, index)
  end
  job.waiting = job.waiting + 1
end

-- Returns the outcome for callers without the lease of an item, and the token of one that has done it already, if any.
local function loss_of(k, index)
  local dead = call('HGET', k.dead, index)
  if dead then return 'lease_lost', string.match(dead, '^%d+\n[^\n]*\n(%d+)\n') end
  -- An item that is not over still has its line, which may be long. So these come before the read of the item.
  for _, part in ipairs({k.leases, k.returned, k.delayed}) do
    if call('ZSCORE', part, index) then return 'lease_lost' end
  end
  local item = call('HGET', k.items, index)
  if not item then return 'not_found' end
  return item == '!' and 'cancelled' or 'lease_lost', string.match(item, '^=(%d+)$')
end

-- Returns the outcome for a caller whose token is not the item's current one.
local function outcome_of_loss(k, index, token)
  local outcome, done = loss_of(k, index)
  return done == token and 'already_done' or outcome
end

-- Submission

-- Returns the digest of the first `lines` lines of a job, or '' if it is unknown. It is if they came through the inbox, or
-- if an older version of Ballast added lines.
local function digest_of(k, lines)
  local number, digest = string.match(call('HGET', k.job, 'digest') or '', '^(%d+) (%x+)$')
  return number and tonumber(number) == lines and #digest == 64 and digest or ''
end

-- ARGV: job id, tenant, priority, deadline (0: none), idempotency key, source, 1 to refuse a passed deadline, 1 for the
-- digest. Reply: new | known, tenant, source, lines, accepted, rejected, 1 if closed, the digest of the lines if it was
-- asked for; or other, and the id of the key's job; or passed, and the time.
local function open(keys, argv)
  local k, now = bind(keys), clock()
  local id, tenant, priority, deadline, key, source = argv[1], argv[2], whole(argv[3]), number(argv[4]), argv[5], argv[6]
  if not priority or not deadline then error('a job has a number that is none') end
  if #id + #tenant + #key + #source > MOST_TEXT - 100 then error('a job has a text that is too long') end
  if key ~= '' then
    local known = call('HGET', k.keys, tenant .. '\n' .. key)
    if known and known ~= id then return {'other', known} end
  end
  local job, status = load_job(k), 'known'
  if job then
    require_readable(job)
  else
    if argv[7] == '1' and deadline > 0 and deadline <= now then return {'passed', string.format('%.3f', now)} end
    status = 'new'
    local sequence = call('HINCRBY', k.totals, 'sequence', 1)
    local due = deadline > 0 and string.format('%016.3f', deadline) or '~'
    job = {was = {}}
    for i, field in ipairs(FIELDS) do
      job[field] = i <= NUM_TEXTS and '' or 0
      job.was[field] = job[field]
    end
    job.id, job.tenant, job.priority, job.state, job.source, job.key = id, tenant, priority, 'validating', source, key
    job.created, job.deadline = now, deadline
    job.rank = string.format('%04d|%s|%s|%015d|%s', 1000 - job.priority, tenant, due, sequence, id)
    save_job(k, job)
    call('ZADD', k.jobs, sequence, id)
    if deadline > 0 then call('ZADD', k.timers, deadline, 'deadline:' .. id) end
    if key ~= '' then call('HSET', k.keys, tenant .. '\n' .. key, id) end
  end
  local digest = argv[8] == '1' and digest_of(k, job.lines) or nil -- an older version expects seven values
  return {status, job.tenant, job.source, job.lines, job.stored, job.total - job.stored, job.closed, digest}
end

-- Returns why a job takes no more lines.
local function why_closed(job)
  if job.ending == 'cancelled' then return 'the job was cancelled before this line came' end
  if job.ending == 'expired' then return 'the job expired before this line came (' .. job.reason .. ')' end
  return 'this line came after the end mark of its job'
end

-- Removes an entry from its inbox, or from `shortened`. Returns whether it was there.
local function remove_entry(k, entry)
  if call('XDEL', k.inbox, entry) == 1 then return true end
  if not k.shortened or call('XDEL', k.shortened, entry) == 0 then return false end
  -- The key would refuse smaller ids, which come if somebody deletes the key of the inbox.
  if call('XLEN', k.shortened) == 0 then call('UNLINK', k.shortened) end
  return true
end

-- The third value of ARGV is two values in one. From 0 on, a submission states how many lines it has stored before. Below 0,
-- an inbox states how many lines the job should have when it is closed: -1 minus this number.
--
-- ARGV: job id, source, lines stored before (see above), 1 to close the job, prefix key; then for each line: kind
-- (a: accepted, r: rejected, b: blank), inbox entry or '', custom_id, custom_id as JSON, line or error as JSON, limit of
-- output tokens ('' for no limit).
-- The call deletes the inbox entries of its lines, and skips lines whose entry another worker has deleted.
-- Reply: ok | missing | closed | elsewhere, lines, accepted, rejected.
local function store(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_job(k)
  if not job or job.source ~= argv[2] then return {'missing'} end
  require_readable(job)
  local before, is_submit = whole(argv[3]), argv[2] == 'submit'
  local rejected = job.total - job.stored
  if is_submit and job.closed == 1 then return {'closed', job.lines, job.stored, rejected} end
  if before >= 0 and before ~= job.lines then return {'elsewhere', job.lines, job.stored, rejected} end
  local items = {}
  for i = 6, #argv, 6 do
    local kind, entry, custom_id, custom_id_json, text = argv[i], argv[i + 1], argv[i + 2], argv[i + 3], argv[i + 4]
    if entry == '' or remove_entry(k, entry) then
      job.lines = job.lines + 1
      local is_fresh = kind ~= 'b' and custom_id ~= '' and job.closed == 0 and call('SADD', k.ids, custom_id) == 1
      if kind == 'a' and is_fresh then
        items[#items + 1] = job.stored
        items[#items + 1] = custom_id_json .. '\n' .. text
        job.stored, job.total, job.waiting = job.stored + 1, job.total + 1, job.waiting + 1
        job.asked_out = job.asked_out + (number(argv[i + 5]) or 0)
        if argv[i + 5] == '' then job.unbounded = job.unbounded + 1 end
      elseif kind ~= 'b' then
        local error = text
        if kind == 'a' and job.closed == 1 then
          error = error_of('job_closed', why_closed(job) .. ': submit it in another job')
        elseif kind == 'a' then
          error = error_of('duplicate_custom_id', 'custom_id: found ' .. custom_id_json
            .. ' twice, expected each custom_id once in a job: Ballast kept only the first line')
        end
        if not is_fresh then custom_id_json = '"line:' .. job.lines .. '"' end
        publish(k, '-', error_result(custom_id_json, 400, error, ''))
        job.failed, job.total = job.failed + 1, job.total + 1
      end
    end
  end
  if #items > 0 then call('HSET', k.items, unpack(items)) end
  if job.was.stored == 0 then job.prefix_key = number(argv[5]) or 0 end
  if argv[4] == '1' and job.closed == 0 then
    if job.total < -1 - before then
      local error = error_of('lines_missing', string.format('lines: found %d in the job, expected %d as its end mark states: '
        .. 'the others did not arrive before it. Submit them in another job', job.total, -1 - before))
      job.lines, job.failed, job.total = job.lines + 1, job.failed + 1, job.total + 1
      publish(k, '-', error_result('"line:' .. job.lines .. '"', 500, error, ''))
    end
    job.closed = 1
    call('UNLINK', k.ids)
    if job.state == 'validating' then job.state = 'in_progress' end
    settle(k, job, now)
  end
  save_job(k, job)
  return {'ok', job.lines, job.stored, job.total - job.stored}
end

-- ARGV: the digest of all lines up to the last one of this call, then those of `store`. Stores lines as `store` does, and
-- the digest. Reply: that of `store`, then the digest of the lines that the job has now, '' if it is unknown.
local function append(keys, argv)
  local k = bind(keys)
  local before = tonumber(call('HGET', k.job, 'lines') or 0)
  local is_known = before == 0 or digest_of(k, before) ~= ''
  local reply = store(keys, every(argv, 2, 1))
  if reply[1] == 'missing' then return reply end
  if reply[1] == 'ok' and is_known then call('HSET', k.job, 'digest', reply[2] .. ' ' .. argv[1]) end
  reply[5] = digest_of(k, reply[2])
  return reply
end

-- Leaves in an entry the last value of each field of OF_ENTRY, and of all others together. Cuts names and values to
-- `most` bytes each. Of an entry with more than MAX_FIELDS, only the first ones count. Returns the bytes that the entry took,
-- which may be too few above MAX_PAGE_BYTES, and whether it has more fields.
local function cut(entry, most)
  local bytes, texts, kept, places = 0, entry[2], {}, {}
  local function keep(at, name, value)
    local place = places[at] or #kept + 1
    places[at], kept[place], kept[place + 1] = place, name, value
  end
  local function short(text)
    return #text > most and string.sub(text, 1, most) or text
  end
  for i = 1, #texts, 2 do
    bytes = bytes + #texts[i] + #texts[i + 1] + FIELD_BYTES
    if i < 2 * MAX_FIELDS then
      keep(OF_ENTRY[texts[i]] and texts[i] or '', short(texts[i]), short(texts[i + 1]))
    elseif bytes >= MAX_PAGE_BYTES then
      break
    end
  end
  local is_long = #texts > 2 * MAX_FIELDS
  if is_long then keep('', 'more than ' .. MAX_FIELDS .. ' fields', '') end
  entry[2], texts = kept, nil
  -- The list of millions of fields takes more memory than any page, and would be there when the next one is read.
  if is_long and bytes >= MAX_PAGE_BYTES then collectgarbage() end
  return bytes, is_long
end

-- Cuts an entry of an inbox as `cut` does. One with more than MAX_FIELDS may take so long to read that the caller gives up
-- before the reply, and nothing would remove it. So it leaves the inbox in this call, and what is left of it waits in
-- `shortened`. The inbox itself could take it under a larger id only. It would then come behind the end mark of its job, and
-- the inbox would refuse the ids that a submitter chose for its next entries.
local function shorten(inbox, entry, most)
  local bytes, is_long = cut(entry, most)
  if is_long and inbox.shortened then
    local id = redis.pcall('XADD', inbox.shortened, entry[1], unpack(entry[2]))
    -- It fails if somebody deleted the key of the inbox while `shortened` had larger ids. The entry then stays where it is.
    if type(id) == 'string' then call('XDEL', inbox.key, entry[1]) end
  end
  return bytes
end

-- Returns the first entry of an inbox from an id on, whether it is in the inbox or in `shortened`, and the bytes that were
-- read. `inbox.short` is the next one in `shortened`. It may be long, so it is read once.
local function next_entry(inbox, from, most)
  local bytes, entry = 0, nil
  if inbox.short == nil then
    inbox.short = inbox.shortened and call('XRANGE', inbox.shortened, from, '+', 'COUNT', 1)[1] or false
    if inbox.short then bytes = cut(inbox.short, most) end
  end
  entry = call('XRANGE', inbox.key, from, inbox.short and '(' .. inbox.short[1] or '+', 'COUNT', 1)[1]
  if entry then return entry, bytes + shorten(inbox, entry, most) end
  entry, inbox.short = inbox.short, nil
  return entry, bytes
end

-- KEYS: inbox, intake, inboxes of tenants; then `shortened` of each inbox, in the same order. ARGV: owner, limit of entries,
-- seconds of the lock, limit of the bytes of a text (the reply has one more byte of a longer text, and no further ones), 1 if
-- KEYS has `shortened`. The inboxes share the limit of entries and MAX_PAGE_BYTES, which only the last entry may exceed.
-- Reply: entries, those of an inbox in the order of their ids. Each entry of a tenant ends with the position of its inbox
-- among those of tenants.
local function begin_intake(keys, argv)
  local owner = call('GET', keys[2])
  if owner and owner ~= argv[1] then return {} end
  local waiting, limit, most = {}, count(argv[2], MOST_ENTRIES), (number(argv[4]) or math.huge) + 1
  local has_shortened = argv[5] == '1' -- an older version does not send these keys
  local num = has_shortened and (#keys - 1) / 2 or #keys - 1
  for i = 1, num do
    local inbox = {key = keys[i == 1 and 1 or i + 1], shortened = has_shortened and keys[num + 1 + i]}
    inbox.length = call('XLEN', inbox.key) + (inbox.shortened and call('XLEN', inbox.shortened) or 0)
    inbox.tenant = i > 1 and i - 1 or nil
    if inbox.length > 0 then waiting[#waiting + 1] = inbox end
  end
  table.sort(waiting, function(a, b) return a.length < b.length end) -- what short inboxes leave goes to long ones
  for i, inbox in ipairs(waiting) do
    inbox.share = math.min(inbox.length, math.ceil(limit / (#waiting - i + 1)))
    limit = limit - inbox.share
  end
  local entries, bytes = {}, 0
  local first = call('TIME')[2] -- microseconds: another inbox is the first each time, so long lines hold up no inbox
  for i = 1, #waiting do
    local inbox = waiting[(first + i) % #waiting + 1]
    local from, enough = '-', bytes + (MAX_PAGE_BYTES - bytes) / (#waiting - i + 1)
    for _ = 1, inbox.share do
      -- The size of an entry is not known before it is read, so each call reads one.
      if bytes >= enough then break end
      local entry, read = next_entry(inbox, from, most)
      if not entry then break end
      from, bytes = '(' .. entry[1], bytes + read
      entry[3] = inbox.tenant
      entries[#entries + 1] = entry
    end
  end
  if #entries > 0 then call('SET', keys[2], argv[1], 'PX', milliseconds(argv[3])) end
  return entries
end

-- KEYS: intake, inboxes that had an entry with the last time of all; then `shortened` of each. ARGV: owner, 1 if KEYS has
-- `shortened`. Redis gives no entry behind such a one an id, so an empty inbox begins again.
local function end_intake(keys, argv)
  local has_shortened = argv[2] == '1'
  local num = has_shortened and (#keys - 1) / 2 or #keys - 1
  for i = 2, num + 1 do
    local left = call('XLEN', keys[i]) + (has_shortened and call('XLEN', keys[num + i]) or 0)
    if left == 0 then call('UNLINK', keys[i]) end
  end
  if call('GET', keys[1]) == argv[1] then return call('DEL', keys[1]) end
  return 0
end

-- Claims and leases

-- KEYS: groups, held. Reply: bands and tenants with claimable items, one per line and unordered (a client reads one
-- string much faster than a thousand); then tenants and the number of items that they hold. Whoever may write to an inbox for
-- all can invent any number of tenants. Of more than MOST_GROUPS bands and tenants, each call returns others.
local function demand(keys, _)
  local groups = call('SMEMBERS', keys[1])
  if #groups > MOST_GROUPS then
    local some, first = {}, call('TIME')[2] -- microseconds
    for i = 1, MOST_GROUPS do some[i] = groups[(first + i) % #groups + 1] end
    groups = some
  end
  return {table.concat(groups, '\n'), pairs_of(keys[2])}
end

-- KEYS: ready. ARGV: limit of jobs per group, then for each group its name, or the rank of a job in it. Reply: the ranks of
-- the group's first jobs, or of those behind this job, nearest deadlines first. Stops after MAX_PAGE_BYTES.
local function look(keys, argv)
  local ranks, bytes = {}, 0
  for i = 2, #argv do
    if bytes >= MAX_PAGE_BYTES then break end
    local last = '(' .. (group_of(argv[i]) or argv[i]) .. '\255'
    local page = call('ZRANGE', keys[1], '(' .. argv[i], last, 'BYLEX', 'LIMIT', 0, count(argv[1], 2 * MOST_ITEMS))
    for _, rank in ipairs(page) do
      ranks[#ranks + 1] = rank
      bytes = bytes + #rank
    end
  end
  return ranks
end

-- Returns values joined by the unit separator. Callers cannot read a single one.
local function joined(values)
  local text = table.concat(values, '\31')
  return #text <= MOST_RECORD and text or '?'
end

-- KEYS: jobs' records. Reply: their first NUM_READ of FIELDS, joined by the unit separator; '' for a deleted job.
local function read(keys, _)
  local records = {}
  for i, key in ipairs(keys) do
    local values = call('HMGET', key, unpack(FIELDS, 1, NUM_READ))
    for j = 1, NUM_READ do values[j] = values[j] or (j <= NUM_TEXTS and '' or '0') end
    records[i] = values[1] == '' and '' or joined(values)
  end
  return records
end

-- KEYS: jobs' records. Reply: their first NUM_HEAD_READ of HEAD, joined in the same way.
local function heads(keys, _)
  local found = {}
  for i, key in ipairs(keys) do
    local values = call('HMGET', key, unpack(HEAD, 1, NUM_HEAD_READ))
    for j = 1, NUM_HEAD_READ do values[j] = values[j] or (j == 1 and '' or '0') end
    found[i] = joined(values)
  end
  return found
end

-- Returns whether the server has no memory for further results. A result is often longer than the line that it replaces, so
-- each claim may need memory. Up to MOST_MEMORY, items are claimed all the same: if waiting lines alone fill the memory,
-- only finished items free it. A server that lets this user see no figures counts as one with memory.
local function is_exhausted()
  local figures = redis.pcall('INFO', 'memory')
  if type(figures) ~= 'string' then return false end
  local used, most = string.match(figures, 'used_memory:(%d+)'), string.match(figures, 'maxmemory:(%d+)')
  return used and most and tonumber(most) > 0 and tonumber(used) > MOST_MEMORY * tonumber(most)
end

-- Returns the token before `n` new ones. Tokens are microseconds of the clock, or follow the last token. So no token comes
-- again if the server loses its last writes, and the counter with them. They are exact numbers until the year 2255.
local function next_token(k, n, now)
  local known = whole(call('HGET', k.totals, 'token')) or 0
  local last = math.max(known <= MOST_WHOLE - n and known or 0, math.floor(now * 1000000))
  call('HSET', k.totals, 'token', string.format('%.0f', last + n))
  return last
end

-- Returns up to `n` items in :returned, and for each that is set aside the number of its model. Leaves out the items that are
-- set aside for a model in `skipped`, of which there are `num_skipped`. A range is read for each such model, whatever the
-- number of its items. Removes what is no item.
local function returned_items(k, job, n, skipped, num_skipped)
  local found, models, from = {}, {}, SET_ASIDE
  local function add(page, model)
    for _, index in ipairs(page) do
      if is_index(index) then
        found[#found + 1], models[#found + 1] = index, model
      else
        call('ZREM', k.returned, index)
      end
    end
  end
  add(call('ZRANGE', k.returned, '-inf', '(' .. SET_ASIDE, 'BYSCORE', 'LIMIT', 0, n))
  for _ = 1, n + num_skipped do
    if #found >= n or job.set_aside <= 0 or skipped[0] then break end
    local score = call('ZRANGE', k.returned, from, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2]
    local model = model_of(score)
    if model < 1 or model > MOST_MODEL then break end -- a score above this is none
    from = string.format('%.0f', (model + 1) * SET_ASIDE)
    if not skipped[model] then
      add(call('ZRANGE', k.returned, score, '(' .. from, 'BYSCORE', 'LIMIT', 0, n - #found), model)
    end
  end
  return found, models
end

-- ARGV: job id, limit of items, worker, then numbers of models that this worker does not serve: items that are set aside for
-- them stay where they are (0: all that are set aside). Reply: expiry, tenant, priority; then for each item its index, token,
-- attempt, line and prefix ('' for none). Only the last item may exceed MAX_PAGE_BYTES. The items behind it stay where they
-- are. If only such items wait, the reply has no item; in all other cases without an item, it is empty.
local function claim(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_job(k)
  if job then require_readable(job) end
  if not job or not is_ready(job) or (job.deadline > 0 and now >= job.deadline) then return {} end
  local n = math.min(count(argv[2], MOST_ITEMS), job.waiting - job.delayed)
  if n < 1 then return {} end
  if is_exhausted() then return {err = 'OOM above ' .. MOST_MEMORY .. ' times maxmemory, no item is claimed'} end
  local skipped = {}
  for i = 4, #argv do skipped[count(argv[i], MOST_MODEL)] = true end
  local returned, models = returned_items(k, job, n, skipped, #argv)
  n = #returned + math.max(0, math.min(n - #returned, job.stored - job.next))
  local expires = now + setting(k, 'lease_seconds', 30)
  local reply = {string.format('%.6f', expires), job.tenant, job.priority}
  if n == 0 then
    job.set_aside = job.waiting - job.delayed -- no others wait. A lower number would keep items for good
    if job.leased == 0 and not has_unserved(job) then job.reason = PARTLY_UNSERVED end
    settle(k, job, now)
    save_job(k, job)
    return reply
  end
  local token, worker = next_token(k, n, now), string.sub(argv[3], 1, MOST_WORKER)
  local live, leases, bytes, num = {}, {}, 0, 0
  -- The size of a line is not known before it is read, so each call reads one.
  while num < n and bytes < MAX_PAGE_BYTES do
    num = num + 1
    local index, attempt, prefix, mark = returned[num], 1, '', ''
    if index then
      local _, spent = live_of(k, index)
      attempt, prefix = spent + 1, call('HGET', k.prefixes, index) or ''
      if models[num] then
        mark, job.set_aside = '*' .. models[num], job.set_aside - 1
      end
    else
      index, job.next = job.next, job.next + 1
    end
    local line, at = call('HGET', k.items, index), 5 * num - 1
    bytes = bytes + #(line or '') + #prefix
    reply[at], reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = index, token + num, attempt, line, prefix
    live[2 * num - 1], live[2 * num] = index, string.format('%d:%d%s:%s', token + num, attempt, mark, worker)
    leases[2 * num - 1], leases[2 * num] = expires, index
  end
  if #returned > 0 then call('ZREM', k.returned, unpack(returned, 1, math.min(num, #returned))) end
  call('HSET', k.live, unpack(live))
  call('ZADD', k.leases, unpack(leases))
  call('ZADD', k.timers, 'LT', expires, 'lease:' .. job.id)
  job.waiting, job.leased = job.waiting - num, job.leased + num
  save_job(k, job)
  return reply
end

-- ARGV: job id, then for each lease its index and token. Reply: positions (from 1) of the lost leases. The others are
-- extended. If the job is ending, every lease is lost and its item ends. After MAX_PAGE_BYTES of lines, the others end when
-- their leases expire.
local function heartbeat(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_counted(k)
  local lost, kept, bytes = {}, {}, 0
  local indexes = every(argv, 2, 2)
  local live = job and call('HMGET', k.live, unpack(indexes)) or {}
  local expires = now + setting(k, 'lease_seconds', 30)
  for i, index in ipairs(indexes) do
    local token, _, _, model = parse_live(live[i])
    if token ~= argv[2 * i + 1] then
      lost[#lost + 1] = i
    elseif job.ending ~= '' then
      lost[#lost + 1] = i
      if bytes < MAX_PAGE_BYTES then
        end_lease(k, job, index)
        bytes = bytes + let_go(k, job, index)
      end
    else
      kept[#kept + 1] = expires
      kept[#kept + 1] = index
      note_served(k, job, model)
    end
  end
  if #kept > 0 then call('ZADD', k.leases, 'XX', unpack(kept)) end
  if job then
    settle(k, job, now)
    save_job(k, job)
  end
  return lost
end

-- ARGV: job id, then for each lease its index, its token, and the tokens that this and earlier attempts computed. The next
-- attempt reads the number at the end of the prefix.
local function progress(keys, argv)
  local k, seen = bind(keys), {}
  for i = 2, #argv, 3 do
    local index = argv[i]
    if not seen[index] and live_of(k, index) == argv[i + 1] then -- once: a prefix may be long
      seen[index] = true
      local prefix = call('HGET', k.prefixes, index) or '{"version":1}'
      -- Only the end is searched: a pattern without an anchor would be tried at each of some 100,000 characters.
      local at = string.find(prefix, ',"num_computed":%d+}$', -40) or #prefix
      call('HSET', k.prefixes, index, string.sub(prefix, 1, at - 1) .. ',"num_computed":'
        .. string.format('%.0f', count(argv[i + 2], MOST_WHOLE)) .. '}')
    end
  end
  return 1
end

-- ARGV: job id, worker, then for each item: index, token, result, tokens in, tokens out, and two texts that are not used.
-- Reply: an outcome for each item.
local function finish(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_counted(k)
  local indexes = every(argv, 3, 7)
  local live = job and call('HMGET', k.live, unpack(indexes)) or {}
  local outcomes, ended, marks, lost = {}, {}, {}, {}
  for i, index in ipairs(indexes) do
    local at = 3 + 7 * (i - 1)
    local token = argv[at + 1]
    local held, _, _, model = parse_live(live[i])
    if not job then
      outcomes[i] = 'not_found'
    elseif ended[index] == token then
      outcomes[i] = 'already_done'
    elseif held ~= token then
      lost[index] = lost[index] or {loss_of(k, index)} -- once: a line may be long
      outcomes[i] = lost[index][2] == token and 'already_done' or lost[index][1]
    else
      ended[index], outcomes[i] = token, 'done'
      note_served(k, job, model)
      job.tokens_in = job.tokens_in + count(argv[at + 3], MOST_WHOLE)
      job.tokens_out = job.tokens_out + count(argv[at + 4], MOST_WHOLE)
      publish(k, index, argv[at + 2])
      marks[#marks + 1] = index
      marks[#marks + 1] = '=' .. token
    end
  end
  if #marks > 0 then
    local done = every(marks, 1, 2)
    call('HSET', k.items, unpack(marks))
    call('HDEL', k.live, unpack(done))
    call('HDEL', k.prefixes, unpack(done))
    call('ZREM', k.leases, unpack(done))
    job.leased, job.succeeded = job.leased - #done, job.succeeded + #done
  end
  if job then
    settle(k, job, now)
    save_job(k, job)
  end
  return outcomes
end

-- ARGV: job id, index, token, prefix ('' keeps an earlier prefix), 1 if the worker serves another model than the item names,
-- the number of this name (an older worker sends none). Spends no attempt.
local function give_back(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_counted(k)
  local index, token, prefix = argv[2], argv[3], argv[4]
  if not job then return 'not_found' end
  local held, attempts = live_of(k, index)
  if held ~= token then return outcome_of_loss(k, index, token) end
  end_lease(k, job, index)
  local outcome = 'done'
  if job.ending ~= '' then
    let_go(k, job, index)
    outcome = 'cancelled'
  else
    if prefix ~= '' then call('HSET', k.prefixes, index, prefix) end
    local is_unservable = argv[5] == '1'
    -- No item is work until one runs: of an older worker, which sends no number, no item is set aside.
    if is_unservable and job.reason ~= PARTLY_UNSERVED then job.reason = UNSERVED end
    release(k, job, index, attempts - 1, 0, is_unservable and count(argv[6], MOST_MODEL))
  end
  settle(k, job, now)
  save_job(k, job)
  return outcome
end

-- ARGV: job id, index, token, code, message, 1 if another attempt may succeed, HTTP status, a random number in [0, 1).
local function retry(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_counted(k)
  local index, token = argv[2], argv[3]
  if not job then return 'not_found' end
  local held, attempts, worker, model = live_of(k, index)
  if held ~= token then return outcome_of_loss(k, index, token) end
  end_lease(k, job, index)
  note_served(k, job, model)
  local outcome
  if job.ending ~= '' then
    let_go(k, job, index)
    outcome = 'cancelled'
  elseif argv[6] == '1' and attempts < setting(k, 'max_attempts', 5) then
    local most = setting(k, 'backoff_max_seconds', 60)
    local backoff = math.min(most, setting(k, 'backoff_seconds', 1) * 2 ^ math.min(attempts - 1, 60))
    -- Between half and all of the backoff, so that items that failed together do not return together.
    local wait = backoff * (1 + (number(argv[8]) or 0)) / 2
    -- The tokens may be the cause. Their number stays, so that they count as wasted when they are computed again.
    local computed = string.match(string.sub(call('HGET', k.prefixes, index) or '', -40), ',"num_computed":([1-9]%d*)}$')
    call('HDEL', k.prefixes, index)
    if computed then call('HSET', k.prefixes, index, '{"version":1,"num_computed":' .. computed .. '}') end
    release(k, job, index, attempts, wait > 0 and now + wait or 0)
    outcome = 'retried'
  else
    local letter = {token = token, attempts = attempts, code = argv[4], message = argv[5], worker = worker}
    letter.status, letter.is_retryable = argv[7], argv[6] == '1'
    bury(k, job, index, letter, now)
    outcome = 'dead'
  end
  settle(k, job, now)
  save_job(k, job)
  return outcome
end

-- Timers

-- KEYS: timers. ARGV: limit. Reply: the timers that are due. Only the last one may exceed MAX_PAGE_BYTES.
local function due(keys, argv)
  local found, bytes, at = {}, 0, string.format('%.6f', clock())
  for i, timer in ipairs(call('ZRANGE', keys[1], '-inf', at, 'BYSCORE', 'LIMIT', 0, count(argv[1], MOST_ITEMS))) do
    if bytes >= MAX_PAGE_BYTES then break end
    found[i], bytes = timer, bytes + #timer
  end
  return found
end

-- Returns for how long leases are spared after a gap in which no timers ran: within this time, every living worker renews
-- its leases. It does so after a third of the lease time, or some seconds after Redis answers again.
local function grace(lease_seconds)
  return math.max(5, lease_seconds / 3 + 2)
end

-- Two functions under one name; with three keys, it is the second.
--
-- KEYS: timers. ARGV: due timers that could not run. They move behind all that are due.
-- KEYS: timers, totals, settings, when a run of timers begins. It notes the time. After a gap, no lease expires for some
-- time: a server that was away, or a clock that jumped, says nothing about the workers. A shorter gap leaves a lease a third
-- of its time. If timers run rarely, several times each, leases also expire: no gap counts if timers ran only within the
-- grace of the one before.
local function postpone(keys, argv)
  local now = clock()
  for _, timer in ipairs(argv) do call('ZADD', keys[1], 'XX', now, timer) end
  if keys[3] then
    local at, found = string.format('%d', math.floor(now * 1000)), call('HMGET', keys[2], 'timers_at', 'spared_at', 'sequence')
    local last, spared = (tonumber(found[1]) or math.huge) / 1000, (tonumber(found[2]) or 0) / 1000
    local lease, since = setting({settings = keys[3]}, 'lease_seconds', 30), last - spared
    if now - last > math.max(2, lease / 3) and (since < 0 or since > grace(lease)) then
      call('HSET', keys[2], 'spared_at', at)
    end
    if found[3] then call('HSET', keys[2], 'timers_at', at) end -- a queue that had no job gets no key
  end
  return #argv
end

-- Returns until when no lease expires, or nil.
local function spared_until(k, now)
  local most = grace(setting(k, 'lease_seconds', 30))
  local left = (tonumber(call('HGET', k.totals, 'spared_at')) or 0) / 1000 + most - now
  return left > 0 and left <= most and now + left or nil -- more is left if the clock was set back
end

local function set_timer(k, what, job_id, zset, now)
  local first = call('ZRANGE', zset, 0, 0, 'WITHSCORES')
  if first[2] then
    call('ZADD', k.timers, math.max(tonumber(first[2]), now), what .. ':' .. job_id)
  else
    call('ZREM', k.timers, what .. ':' .. job_id)
  end
end

-- ARGV: job id, limit of items. An expired lease spends its attempt, but no lease expires after a gap (see `postpone`).
-- Stops after MAX_PAGE_BYTES of lines. Reply: the number of expired leases.
local function expire_leases(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_counted(k)
  if not job then return call('ZREM', k.timers, 'lease:' .. argv[1]) * 0 end
  local spared = spared_until(k, now)
  if spared then return call('ZADD', k.timers, spared, 'lease:' .. job.id) * 0 end
  local indexes = call('ZRANGE', k.leases, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, count(argv[2], MOST_ITEMS))
  local most, bytes, num = setting(k, 'max_attempts', 5), 0, 0
  for _, index in ipairs(indexes) do
    if bytes >= MAX_PAGE_BYTES then break end
    num = num + 1
    local _, attempts, worker = live_of(k, index)
    end_lease(k, job, index)
    if job.ending ~= '' then
      bytes = bytes + let_go(k, job, index)
    elseif not is_index(index) then
      job.lost = job.lost + 1
    elseif attempts >= most then
      local message = string.format(
        'no worker finished this request: %d of %d attempts ended with an expired lease or an error; last worker: %s',
        attempts, most, worker)
      -- No caller has token 0, so a worker that returns late gets lease_lost.
      local letter = {token = '0', attempts = attempts, code = 'lease_expired', message = message, worker = worker}
      letter.status, letter.is_retryable = 504, true
      bytes = bytes + bury(k, job, index, letter, now)
    else
      release(k, job, index, attempts, 0)
    end
  end
  set_timer(k, 'lease', job.id, k.leases, now)
  settle(k, job, now)
  save_job(k, job)
  return num
end

-- ARGV: job id, limit of items. Makes items whose backoff has ended claimable. Reply: the number of items.
local function wake(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_counted(k)
  if not job then return call('ZREM', k.timers, 'wake:' .. argv[1]) * 0 end
  local indexes = call('ZRANGE', k.delayed, '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, count(argv[2], MOST_ITEMS))
  for _, index in ipairs(indexes) do
    call('ZREM', k.delayed, index)
    if is_index(index) then call('ZADD', k.returned, index, index) end
  end
  job.delayed = job.delayed - #indexes
  set_timer(k, 'wake', job.id, k.delayed, now)
  save_job(k, job)
  return #indexes
end

-- ARGV: job id, cancelled | expired. Stops claims. `sweep` then writes the error results of the waiting items.
-- Reply: 1 if this call began the end.
local function begin_end(keys, argv)
  local k, now = bind(keys), clock()
  if argv[2] == '' or not ENDINGS[argv[2]] then error('an ending that is none') end
  local job = load_job(k)
  if not job or OVER[job.state] or job.ending ~= '' then
    call('ZREM', k.timers, 'deadline:' .. argv[1], 'abandon:' .. argv[1])
    return 0
  end
  if argv[2] == 'expired' then
    local abandoned = tonumber(call('ZSCORE', k.timers, 'abandon:' .. job.id) or math.huge)
    local left = (job.waiting + job.leased) .. ' of ' .. job.total .. ' items left'
    if job.deadline > 0 and now >= job.deadline then
      job.reason = 'the deadline passed with ' .. left
    elseif now >= abandoned then
      local is_served = job.state == 'paused' or not is_unserved(job)
      job.reason = is_served and 'the job was paused or open for too long' or 'no worker served its model for too long'
      job.reason = job.reason .. ', with ' .. left
    else
      return 0
    end
  end
  forget_unserved(job)
  job.ending, job.set_aside = argv[2], 0 -- `sweep` ends these items with the others
  job.state = argv[2] == 'expired' and 'finalizing' or 'cancelling'
  job.closed = 1
  call('UNLINK', k.ids)
  call('ZREM', k.timers, 'deadline:' .. job.id, 'wake:' .. job.id)
  call('ZADD', k.timers, now, 'sweep:' .. job.id)
  settle(k, job, now)
  save_job(k, job)
  return 1
end

-- ARGV: job id, limit of items. Ends items that wait. Stops after MAX_PAGE_BYTES of lines. If the job has lost more than
-- MOST_LOST lines, the items that no worker has claimed yet end at once. Reply: the number of items; 0: none is left.
local function sweep(keys, argv)
  local k, now, timer = bind(keys), clock(), 'sweep:' .. argv[1]
  local job = load_counted(k)
  if not job or job.ending == '' or OVER[job.state] then return call('ZREM', k.timers, timer) * 0 end
  local limit, bytes, num = count(argv[2], MOST_ITEMS), 0, 0
  while num < limit and bytes < MAX_PAGE_BYTES do
    local index = job.next
    if index < job.stored then
      job.next = index + 1
    else
      index = call('ZPOPMIN', k.returned)[1]
      if not index then
        index = call('ZPOPMIN', k.delayed)[1]
        if not index then
          job.waiting = num -- otherwise, the job would never end
          break
        end
        job.delayed = job.delayed - 1
      end
    end
    bytes, num = bytes + let_go(k, job, index), num + 1
    local left = job.lost > MOST_LOST and math.max(0, job.stored - job.next) or 0
    job.next, num, job[job.ending] = job.next + left, num + left, job[job.ending] + left
  end
  job.waiting = job.waiting - num
  if job.waiting == 0 then
    call('ZREM', k.timers, timer)
  else
    call('ZADD', k.timers, now, timer)
  end
  settle(k, job, now)
  save_job(k, job)
  return num
end

-- ARGV: job id, 1 if a user deletes it (an older version sends none). Deletes a job that is over: after the retention of its
-- results, or at once for a user. Reply: 1 if it did; for a user ok | missing | conflict, the state.
local function forget(keys, argv)
  local k, timer, is_user = bind(keys), 'forget:' .. argv[1], argv[2] == '1'
  local at, job = call('ZSCORE', k.timers, timer), load_job(k)
  local is_over = job and OVER[job.state]
  if is_user then
    if not is_over then return {job and 'conflict' or 'missing', job and job.state or ''} end
  elseif not at or tonumber(at) > clock() then
    return 0
  end
  if is_over then require_numbers(job, SUMMED, 1) end
  call('ZREM', k.timers, timer)
  if not is_over then return 0 end
  -- Not `-job[field]`: that of 0 is -0.0, which Redis before 7.2.5 writes as `-0`, and HINCRBY refuses that.
  for _, field in ipairs(SUMMED) do call('HINCRBY', k.totals, field, 0 - job[field]) end
  call('HINCRBY', k.totals, 'jobs:' .. job.state, -1)
  if job.key ~= '' then call('HDEL', k.keys, job.tenant .. '\n' .. job.key) end
  call('ZREM', k.jobs, job.id)
  call('UNLINK', k.job, k.items, k.live, k.returned, k.delayed, k.leases, k.prefixes, k.dead, k.results, k.ids)
  return is_user and {'ok', job.state} or 1
end

-- Changes by users

-- ARGV: job id, paused | resumed. A resumed job is no longer unserved. Reply: ok | missing | conflict, the state.
local function hold(keys, argv)
  local k = bind(keys)
  local job = load_job(k)
  if not job then return {'missing', ''} end
  if job.ending ~= '' or OVER[job.state] then return {'conflict', job.state} end
  if argv[2] == 'paused' then
    job.state = 'paused'
  else
    forget_unserved(job)
    if job.state == 'paused' then job.state = job.closed == 1 and 'in_progress' or 'validating' end
  end
  save_job(k, job)
  return {'ok', job.state}
end

-- ARGV: job id, approximate limit, cursor ('0' at first), 1 to include dead letters that no attempt can serve. Dead
-- letters wait again with fresh attempts, and their error results are removed.
-- Reply: ok | missing | conflict | passed, number of items (or the state), cursor ('0': finished), dead letters left.
local function redrive(keys, argv)
  local k, now = bind(keys), clock()
  local job = load_counted(k)
  if not job then return {'missing', 0, '0', 0} end
  if job.ending ~= '' or (OVER[job.state] and job.state ~= 'completed') then return {'conflict', job.state, '0', 0} end
  if job.dead == 0 then return {'ok', 0, '0', 0} end
  if job.deadline > 0 and now >= job.deadline then return {'passed', job.state, '0', 0} end
  local reply, n = call('HSCAN', k.dead, argv[3], 'COUNT', math.max(1, count(argv[2], MOST_ITEMS))), 0
  local cursor, page = reply[1], reply[2]
  for i = 1, #page, 2 do
    local index, letter = page[i], page[i + 1]
    local id = is_index(index) and string.match(string.sub(letter, 1, 100), '^%d+\n(%d+%-%d+)\n%d+\n')
    -- `bury` writes the field in this place. To decode a long letter would take 40 times its memory, beyond maxmemory.
    if id and (argv[4] == '1' or string.find(letter, ',"is_retryable":true,"at":[%d.]+}$', -60)) then
      redis.pcall('XDEL', k.results, id) -- an id above the last possible one is an error
      call('HDEL', k.dead, index)
      release(k, job, index, 0, 0)
      n = n + 1
    end
  end
  job.failed, job.dead = job.failed - n, job.dead - n
  if n > 0 then note_served(k, job, 0) end -- as at first, they are work
  if n > 0 and job.state == 'completed' then
    job.state, job.finished = 'in_progress', 0
    call('ZREM', k.timers, 'forget:' .. job.id)
    if job.deadline > 0 then call('ZADD', k.timers, job.deadline, 'deadline:' .. job.id) end
  end
  save_job(k, job)
  return {'ok', n, cursor, job.dead}
end

-- ARGV: job id, yes | at_risk | no | unknown, reason. Stores whether a job will meet its deadline.
local function appraise(keys, argv)
  local k = bind(keys)
  local job = load_job(k)
  if not job or OVER[job.state] or job.ending ~= '' then return 0 end
  job.outlook, job.because, job.appraised = string.sub(argv[2], 1, MOST_TEXT), string.sub(argv[3], 1, MOST_TEXT), clock()
  save_job(k, job)
  return 1
end

-- KEYS: a job's results. ARGV: id of the entry before, limit, id of an earlier entry (an older version sends none). A failover
-- may have removed the entry before, and the entries behind it may then have smaller ids. So the reply begins behind the
-- earlier entry if only that exists, and with the first one if neither does. Only the last result may exceed MAX_PAGE_BYTES.
-- Reply: for each result the id of its entry, and its JSON.
local function results(keys, argv)
  local reply, bytes, after, limit = {}, 0, argv[1], 2 * count(argv[2], MOST_ENTRIES)
  local function exists(id) return #call('XRANGE', keys[1], id, id) > 0 end
  if argv[3] and not exists(after) then after = exists(argv[3]) and argv[3] or '0' end
  while #reply < limit and bytes < MAX_PAGE_BYTES do
    local entry = call('XRANGE', keys[1], '(' .. after, '+', 'COUNT', 1)[1]
    if not entry then break end
    after = entry[1]
    local json = entry[2][4] or ''
    reply[#reply + 1], reply[#reply + 2] = after, json
    bytes = bytes + #json + #entry[2] * FIELD_BYTES
  end
  return reply
end

-- The queue as a whole

-- KEYS: a key. ARGV: seconds. Reply: 1 for the first call within these seconds. A turn that began in the future does not
-- count: a server whose clock is behind took over.
local function take_turn(keys, argv)
  local now = clock()
  if (tonumber(call('GET', keys[1])) or 0) > now then call('DEL', keys[1]) end
  local value = string.format('%.6f', now)
  return call('SET', keys[1], value, 'NX', 'PX', milliseconds(argv[1])) and 1 or 0
end

-- KEYS: totals, inbox, backlog, inboxes of tenants, `shortened` of each inbox. Reply: now, length of all inboxes, created of
-- the oldest waiting job ('' for none), id of the oldest inbox entry, then the totals, with `exhausted` 1 if `claim` refuses
-- every item.
local function stats(keys, _)
  local oldest = call('ZRANGE', keys[3], 0, 0, 'WITHSCORES')
  local length, since, entry, bytes = 0, math.huge, '', 0
  for i, key in ipairs(keys) do
    if i == 2 or i > 3 then
      local here = call('XLEN', key)
      length = length + here
      -- Redis returns no id without its entry. If the entries are long, those of some inboxes must do.
      local first = here > 0 and bytes < MAX_PAGE_BYTES and call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
      if first then
        bytes = bytes + cut(first, 0)
        local at = tonumber(string.match(first[1], '^%d+'))
        if at < since then since, entry = at, first[1] end
      end
    end
  end
  local totals, values = {}, call('HMGET', keys[1], unpack(OF_TOTALS))
  for i, field in ipairs(OF_TOTALS) do
    if values[i] then totals[#totals + 1], totals[#totals + 2] = field, string.sub(values[i], 1, 64) end
  end
  if is_exhausted() then
    totals[#totals + 1] = 'exhausted'
    totals[#totals + 1] = '1'
  end
  return {string.format('%.6f', clock()), length, oldest[2] or '', entry, totals}
end

-- KEYS: settings. ARGV: owner, rank, created, generation, JSON, then names and numbers. Of several owners, the one with
-- the lowest rank, then the oldest, has its settings in force while it renews them. Of one owner, the newest count while
-- anybody applies them: a resource that was restored from a backup has an older generation.
-- Reply: 1 if they are in force now.
local function set_settings(keys, argv)
  local now, known = clock(), call('HMGET', keys[1], 'owner', 'rank', 'created', 'generation', 'renewed', 'applied')
  local at = string.format('%.6f', now)
  local rank, created, generation = tonumber(argv[2]), tonumber(argv[3]), tonumber(argv[4])
  local known_rank, known_created = tonumber(known[2]), tonumber(known[3])
  if known[1] == argv[1] then
    local is_older = created < known_created or (created == known_created and generation < tonumber(known[4]))
    if is_older and not known[6] then call('HSET', keys[1], 'applied', at) end -- an older version wrote them
    if is_older and now - tonumber(known[6] or now) < RENEWAL_SECONDS then return 0 end
  elseif known[1] and now - tonumber(known[5]) < RENEWAL_SECONDS then
    if known_rank < rank or (known_rank == rank and known_created <= created) then return 0 end
  end
  call('HSET', keys[1], 'owner', argv[1], 'rank', argv[2], 'created', argv[3], 'generation', argv[4], 'json', argv[5],
    'renewed', at, 'applied', at, unpack(argv, 6))
  return 1
end

-- KEYS: declared. ARGV: the tenants that the settings in force declare.
local function declare(keys, argv)
  local now = clock()
  for _, tenant in ipairs(argv) do call('ZADD', keys[1], now, tenant) end
  for _ = 1, MOST_ENTRIES do
    if not call('ZRANGE', keys[1], -1 - MAX_DECLARED, -1 - MAX_DECLARED)[1] then break end
    call('ZPOPMIN', keys[1])
  end
  return #argv
end

-- KEYS: inboxes, `shortened` of each. Reply: the number of entries of each key.
local function lengths(keys, _)
  local found = {}
  for i, key in ipairs(keys) do found[i] = call('XLEN', key) end
  return found
end

-- KEYS: settings. ARGV: owner, 1 for all values. Reply: the owner of the settings in force, or '' if none is known; or all
-- values: the owner, created and generation.
local function renew_settings(keys, argv)
  local known = call('HMGET', keys[1], 'owner', 'created', 'generation')
  local owner = known[1] or ''
  if owner ~= '' and owner == argv[1] then call('HSET', keys[1], 'renewed', string.format('%.6f', clock())) end
  return argv[2] == '1' and {owner, known[2] or '0', known[3] or '0'} or owner -- an older version expects the owner
end

-- KEYS: settings. ARGV: owner. Reply: 1 if its settings were in force and are removed.
local function drop_settings(keys, argv)
  if call('HGET', keys[1], 'owner') ~= argv[1] then return 0 end
  return call('DEL', keys[1])
end

-- KEYS: service. ARGV: tenants and costs. A tenant without an entry starts at the level. Reply: the ledger.
local function charge(keys, argv)
  local level = call('HGET', keys[1], '') or '0'
  for i = 1, #argv, 2 do
    call('HSETNX', keys[1], argv[i], level)
    call('HINCRBYFLOAT', keys[1], argv[i], argv[i + 1])
  end
  return pairs_of(keys[1])
end

-- KEYS: service. ARGV: a level, then tenants. The level never falls. Tenants below it rise to it.
-- Reply: the ledger.
local function lift(keys, argv)
  local function raise(field)
    local known = number(call('HGET', keys[1], field)) or -math.huge
    if (number(argv[1]) or -math.huge) > known then call('HSET', keys[1], field, argv[1]) end
  end
  raise('')
  for i = 2, #argv do
    if call('HEXISTS', keys[1], argv[i]) == 1 then raise(argv[i]) end
  end
  return pairs_of(keys[1])
end

-- KEYS: service. ARGV: tenants and their service. Removes the tenants whose service has not changed.
local function forget_service(keys, argv)
  for i = 1, #argv, 2 do
    if call('HGET', keys[1], argv[i]) == argv[i + 1] then call('HDEL', keys[1], argv[i]) end
  end
  return pairs_of(keys[1])
end

-- KEYS: workers, statuses. ARGV: worker, seconds (0 removes the status), JSON. Also removes expired statuses.
local function publish_status(keys, argv)
  local now = clock()
  for _, worker in ipairs(call('ZRANGE', keys[1], '-inf', string.format('%.6f', now), 'BYSCORE', 'LIMIT', 0, 100)) do
    call('ZREM', keys[1], worker)
    call('HDEL', keys[2], worker)
  end
  local seconds = number(argv[2]) or 0
  if seconds > 0 then
    call('ZADD', keys[1], now + seconds, argv[1])
    call('HSET', keys[2], argv[1], argv[3])
  else
    call('ZREM', keys[1], argv[1])
    call('HDEL', keys[2], argv[1])
  end
  return 1
end

-- KEYS: workers, statuses. Reply: JSON of the statuses that have not expired, up to MAX_STATUSES_BYTES in all. It leaves
-- out longer ones than MAX_STATUS_BYTES, and stops after MAX_PAGE_BYTES of them.
local function statuses(keys, _)
  local reply, left, bytes = {}, MAX_STATUSES_BYTES, 0
  for _, worker in ipairs(call('ZRANGE', keys[1], string.format('(%.6f', clock()), '+inf', 'BYSCORE', 'LIMIT', 0, MAX_STATUSES)) do
    if bytes >= MAX_PAGE_BYTES then break end
    local text = call('HGET', keys[2], worker)
    bytes = bytes + #(text or '')
    if text and #text <= MAX_STATUS_BYTES then
      left = left - #text
      if left < 0 then break end
      reply[#reply + 1] = text
    end
  end
  return reply
end

-- KEYS: any key of the queue, for its hash slot. ARGV: cursor, pattern. Delete a page of the keys that match the pattern.
-- Only an administrator may list keys. A user of the queue chooses names of any length, so no reply has names. Reply: the
-- next cursor.
local function remove_keys(_, argv)
  local found = call('SCAN', argv[1], 'MATCH', argv[2], 'COUNT', 1000)
  for _, key in ipairs(found[2]) do
    call('UNLINK', key)
  end
  return found[1]
end

local function now(_, _)
  return string.format('%.6f', clock())
end

local function revision(_, _)
  return REVISION
end

-- With `allow-oom`, a server without free memory still accepts the results of the items that workers hold. It refuses new
-- work, and `claim` limits by how much results exceed its memory.
local function register(name, callback, flags)
  redis.register_function{function_name = 'ballast1_' .. name, callback = callback, flags = flags}
end

register('open', open, {})
register('store', store, {})
register('append', append, {})
register('begin_intake', begin_intake, {'allow-oom'})
register('end_intake', end_intake, {'allow-oom'})
register('demand', demand, {'no-writes'})
register('look', look, {'no-writes'})
register('read', read, {'no-writes'})
register('heads', heads, {'no-writes'})
register('results', results, {'no-writes'})
register('claim', claim, {'allow-oom'})
register('heartbeat', heartbeat, {'allow-oom'})
register('progress', progress, {'allow-oom'})
register('finish', finish, {'allow-oom'})
register('give_back', give_back, {'allow-oom'})
register('retry', retry, {'allow-oom'})
register('due', due, {'no-writes'})
register('postpone', postpone, {'allow-oom'})
register('expire_leases', expire_leases, {'allow-oom'})
register('wake', wake, {'allow-oom'})
register('begin_end', begin_end, {'allow-oom'})
register('sweep', sweep, {'allow-oom'})
register('forget', forget, {'allow-oom'})
register('hold', hold, {'allow-oom'})
register('redrive', redrive, {'allow-oom'})
register('take_turn', take_turn, {'allow-oom'})
register('appraise', appraise, {'allow-oom'})
register('stats', stats, {'no-writes'})
register('set_settings', set_settings, {'allow-oom'})
register('declare', declare, {'allow-oom'})
register('lengths', lengths, {'no-writes'})
register('renew_settings', renew_settings, {'allow-oom'})
register('drop_settings', drop_settings, {'allow-oom'})
register('charge', charge, {'allow-oom'})
register('lift', lift, {'allow-oom'})
register('forget_service', forget_service, {'allow-oom'})
register('publish_status', publish_status, {'allow-oom'})
register('statuses', statuses, {'no-writes'})
register('remove_keys', remove_keys, {'allow-oom'})
register('now', now, {'no-writes'})
register('revision', revision, {'no-writes'})
