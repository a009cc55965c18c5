//! The twins: the Lua script on a real Redis and the Rust code give the same verdicts on the same
//! random traces, with rules that change in between.
//!
//! Both run on virtual time. For Redis a prelude stands in for `lua/clock.lua`: it takes the time from
//! the last argument, and keeps expiries in it as well. The rest of the script is the one that ships.

use std::sync::Arc;

use tollgate::clock::{ManualClock, Timestamp};
use tollgate::limit::Limit;
use tollgate::limit::concurrency::Concurrency;
use tollgate::limit::fixed_window::FixedWindow;
use tollgate::limit::quota::{Period, Quota, Zone};
use tollgate::limit::sliding_log::SlidingLog;
use tollgate::limit::sliding_window::SlidingWindow;
use tollgate::rule::{Check, Checks, Demand};
use tollgate::store::memory::MemoryStore;
use tollgate::store::redis::script::{Flight, SOURCE};

use crate::contract::check;
use crate::harness::{Random, Redis};

const PRELUDE: &str = "
local now = tonumber(table.remove(ARGV))
local real = redis
local function timed(run)
  return function(command, key, value, ...)
    local expiry = real.call('GET', 'exp:' .. key)
    if expiry and (tonumber(expiry) <= now or real.call('EXISTS', key) == 0) then
      real.call('DEL', key, 'exp:' .. key)
      expiry = nil
    end
    if command == 'PTTL' then
      return expiry and math.floor((tonumber(expiry) - now) / 1000) or -1
    elseif command == 'PEXPIRE' then
      if real.call('EXISTS', key) == 0 then return 0 end
      return real.call('SET', 'exp:' .. key, string.format('%.0f', now + tonumber(value) * 1000))
    end
    return run(command, key, value, ...)
  end
end
local redis = { call = timed(real.call), pcall = timed(real.pcall) }
";

struct Twins {
    connection: redis::Connection,
    sha: String,
    memory: MemoryStore,
}

impl Twins {
    /// The twins, after `mutate` has had the script in its hands.
    fn new(redis: &Redis, mutate: impl Fn(String) -> String) -> Self {
        let mut connection = redis.client().get_connection().unwrap();
        let clock = include_str!("../lua/clock.lua");
        assert!(SOURCE.starts_with(clock));
        let script = mutate(format!("{PRELUDE}{}", &SOURCE[clock.len()..]));
        let sha = redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut connection).unwrap();
        redis::cmd("FLUSHDB").exec(&mut connection).unwrap();
        Self { connection, sha, memory: MemoryStore::new(1_000_000, Arc::new(ManualClock::default())) }
    }

    /// Whether both say the same to all requests of one flight.
    fn agree(&mut self, requests: &[Checks], now: Timestamp) -> Result<(), String> {
        let mut flight = Flight::new();
        for request in requests {
            flight.board(request.clone());
        }
        let mut command = flight.command(&self.sha);
        command.arg(now.as_micros());
        let reply: redis::Value = command.query(&mut self.connection).unwrap();
        for (request, lua) in requests.iter().zip(flight.answers(&reply)) {
            let lua = lua.map_err(|fault| fault.to_string())?;
            let rust = self.memory.take_at(request, now);
            if lua != rust {
                return Err(format!("{request:?} at {now:?}\nLua  {lua:?}\nRust {rust:?}"));
            }
        }
        Ok(())
    }

    /// Random flights; the number of requests they had, or what the twins did not agree on.
    fn run(&mut self, seed: u64, flights: usize) -> Result<usize, String> {
        let mut random = Random(seed);
        let mut now = Timestamp::from_micros(1_764_000_000_000_000);
        let mut rules: Vec<Rule> = (0..18).map(|index| (20, "10", index % 6)).collect();
        let mut requests = 0;
        for _ in 0..flights {
            if random.below(20) == 0 {
                let rule = random.below(rules.len() as u64) as usize;
                rules[rule] = (random.choose(&CAPACITIES), random.choose(&RATES), rule as u64 % 6);
            }
            now = match random.below(40) {
                0 => now.minus_micros(random.below(3_000_000)),
                1 => now.plus_micros(random.below(86_400_000_000 * 40)),
                // Redis' clock was set back.
                2 if random.below(4) == 0 => now.minus_micros(random.below(86_400_000_000 * 40)),
                2..10 => now.plus_micros(random.below(3_000_000)),
                10..15 => now.plus_micros(random.below(20_000)),
                // Often just a window later.
                15..20 => now.plus_micros(random.below(20) * 1_000),
                _ => now,
            };
            let flight: Vec<Checks> =
                (0..=random.below(8)).map(|_| request(&mut random, &rules, now)).collect();
            requests += flight.len();
            self.agree(&flight, now).map_err(|difference| format!("seed {seed}: {difference}"))?;
            self.all_expire().map_err(|key| format!("seed {seed}: {key} lives for ever at {now:?}"))?;
        }
        Ok(requests)
    }

    /// Whether all keys have an end; if not, which.
    fn all_expire(&mut self) -> Result<(), String> {
        let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut self.connection).unwrap();
        keys.sort_unstable();
        let expires =
            |key: &String| key.starts_with("exp:") || keys.binary_search(&format!("exp:{key}")).is_ok();
        keys.iter().find(|key| !expires(key)).map_or(Ok(()), |key| Err(key.clone()))
    }
}

const CAPACITIES: [u64; 12] =
    [1, 2, 3, 10, 20, 200, 1_000_000, 1_000_000_000, 1_000_000_001, 1 << 40, (1 << 53) - 1, 1 << 53];
const RATES: [&str; 12] = [
    "10",
    "1/m",
    "5/m",
    "1/15s",
    "0.333",
    "33.333",
    "1000/h",
    "7/3s",
    "100",
    "1000000",
    "700000",
    "3000000000",
];

/// Capacity, rate, and which algorithm.
type Rule = (u64, &'static str, u64);

/// Lengths of windows, in milliseconds.
const WINDOWS: [u64; 5] = [10, 1_000, 60_000, 3_600_000, 86_400_000];

/// The limit of a rule: numbers of the other algorithms follow from those of the token bucket.
fn limit(rule: Rule, now: Timestamp, random: &mut Random) -> Limit {
    let (capacity, rate, kind) = rule;
    let window = WINDOWS[rate.len() % WINDOWS.len()] * 1_000;
    let limit = capacity.min(20_000_000);
    match kind {
        0 => check("", capacity, rate, 1).limit,
        1 => Limit::FixedWindow(FixedWindow { limit: capacity, window }),
        2 => Limit::SlidingWindow(SlidingWindow { limit, window }),
        3 => Limit::SlidingLog(SlidingLog { limit: capacity.min(40), window }),
        4 => {
            let period = [Period::Day, Period::Week, Period::Month][rate.len() % 3];
            let zone = ["UTC", "Europe/Berlin", "Asia/Ho_Chi_Minh"][capacity as usize % 3];
            // The clock of the gateway is half an hour off, now and then by more than a period.
            let off = if random.below(20) == 0 { 3_000_000_000_000 } else { 2_000_000_000 };
            let skewed = now.plus_micros(random.below(2 * off)).minus_micros(off);
            Limit::Quota(Quota::new(capacity, period, Zone::named(zone).unwrap()).on(skewed))
        }
        _ => Limit::Concurrency(Concurrency { limit: capacity.min(5), hold: window.max(1_000_000) }),
    }
}

/// One to six different buckets.
fn request(random: &mut Random, rules: &[Rule], now: Timestamp) -> Checks {
    let first = random.below(rules.len() as u64) as usize;
    let count = random.choose(&[1, 1, 1, 2, 3, 6]);
    let one = |offset: usize, random: &mut Random| -> Check {
        let bucket = (first + offset * 5) % rules.len();
        let (capacity, rate, kind) = rules[bucket];
        let mut limit = limit(rules[bucket], now, random);
        let most = limit.capacity();
        let cost = match random.below(10) {
            0 => 0,
            1 => random.below(most.saturating_add(2)),
            2 => most,
            _ => 1 + random.below(3),
        };
        let demand = match random.below(12) {
            0 => Demand::Debit,
            1 => Demand::Shadow,
            2 if kind == 0 => Demand::Lease,
            2 | 3 => Demand::Return,
            4 => random.choose(&[Demand::Peek, Demand::Watch]),
            5 if kind == 5 => Demand::Renew,
            _ => Demand::Take,
        };
        // A debit may come from an older rule than the one of the day.
        if kind == 0 && demand == Demand::Debit && random.below(2) == 0 {
            limit = check("", capacity.div_ceil(3), rate, 1).limit;
        }
        let cost = match (kind, demand) {
            (5, _) => 1,
            (3, Demand::Debit) => 1 + cost % 50,
            (_, Demand::Debit | Demand::Return) => cost.max(1),
            _ => cost,
        };
        let permit = 1 + random.below(8);
        Check { demand, limit, permit, ..check(&format!("b{bucket}"), 1, "1", cost) }
    };
    (0..count).map(|offset| one(offset, random)).collect()
}

#[test]
fn random_traces_give_the_same_verdicts() {
    same_verdicts(&Redis::start());
}

#[test]
fn random_traces_on_redis_6_2() {
    same_verdicts(&Redis::other("redis-6.2"));
}

#[test]
fn random_traces_on_valkey() {
    same_verdicts(&Redis::other("valkey-9.1"));
}

fn same_verdicts(redis: &Redis) {
    let mut requests = 0;
    for seed in 1..=25 {
        let mut twins = Twins::new(redis, |script| script);
        requests += twins.run(seed, 1_000).unwrap_or_else(|difference| panic!("{difference}"));
    }
    assert!(requests > 100_000, "{requests}");
}

const PLANTED: [(&str, &str); 52] = [
    ("if question.cost > units and question.votes", "if question.cost >= units and question.votes"),
    ("if question.cost > units and question.votes", "if question.cost > units"),
    ("elseif cost > units and", "elseif cost >= units and"),
    ("elseif cost > units and cost > 0", "elseif cost > units"),
    ("elseif (admitted and question.takes or question.shadow) and cost > 0", "elseif cost > 0"),
    ("elseif (admitted and question.takes or question.shadow)", "elseif (admitted and question.takes)"),
    ("return units, now - floor((part - partial * d) / n)", "return units, now"),
    ("if elapsed <= 0 then return units, at end", "if elapsed <= 0 then return units, now end"),
    ("if elapsed < 0 and -elapsed > time_to_earn(capacity, n, d) then", "if false then"),
    ("    pcall('HSET', key, 'ts', now_text)\n", ""),
    ("if since > ending then", "if false then"),
    ("if since > start + question.a then", "if false then"),
    ("if last and last - now > question.a then", "if false then"),
    ("    pcall('ZREMRANGEBYSCORE', key, ahead, '+inf')\n", ""),
    ("begin = now - (now - last) % length", "begin, length = last, length * 100"),
    ("  pcall('HSET', key, 'since', format('%.0f', since))\n", ""),
    ("whole * d + ceil((need", "whole * d + floor((need"),
    ("time = ceil(need / n)", "time = floor(need / n)"),
    ("units = units + elapsed * n\n", "units = units + (elapsed - 1) * n\n"),
    ("    units = capacity\n  end", "  end"),
    ("if question.debit then return units, elapsed > 0 and now or at end", ""),
    ("math.max(units - cost, math.min(units, question.lowest))", "units - cost"),
    ("math.max(units - cost, math.min(units, question.lowest))", "math.max(units - cost, question.lowest)"),
    ("math.max(units - cost, math.min(units, question.lowest))", "math.max(units - cost, 0)"),
    ("if units < question.least then units = question.least end", ""),
    ("demand == 'debit' and limit - EXACT or lowest", "lowest"),
    ("sign = -units, '-'", "sign = -units, ''"),
    ("math.min(limit, EXACT - limit)", "limit"),
    ("and call('PTTL', KEYS[key + i]) < reset", "and false"),
    ("(code == 0 or code == 3 and retry == 0)", "code == 0"),
    ("units - units % question.scale", "units"),
    ("math.min(cost, units - units", "math.min(cost + question.scale, units - units"),
    ("units = units - retry * question.scale", ""),
    ("units = math.min(units + cost, capacity)", "units = units + cost"),
    (
        "(admitted and question.takes or question.shadow) and cost > 0",
        "(admitted or question.shadow) and cost > 0",
    ),
    ("(demand == 'take' or demand == 'peek')", "demand == 'take'"),
    (
        "if since >= start then return { count = count, since = since } end",
        "if since == start then return { count = count, since = since } end",
    ),
    ("if question.cost > state.left then return 0", "if question.cost >= state.left then return 0"),
    ("elseif now >= ending then", "elseif false then"),
    ("if now < begin then", "if false then"),
    ("and not state.is_over", ""),
    ("if since >= start - question.a then", "if since > start - question.a then"),
    ("local rest = window - passed", "local rest = window"),
    (
        "floor((all - (count + cost) * window) / previous)",
        "math.ceil((all - (count + cost) * window) / previous)",
    ),
    ("format('(%.0f', now - question.a)", "format('%.0f', now - question.a)"),
    ("leaves(used + cost - limit - 1)", "leaves(0)"),
    ("now_text, same + i)", "now_text, i)"),
    ("format('(%.0f', now), '+inf')", "'-inf', '+inf')"),
    ("if not counts then return nil end", ""),
    ("return counts_still(key, question.b_text)\n      and (", "return ("),
    ("code == 0 and call('PTTL', key) < state.reset", "false"),
    ("if state.code ~= 1 and question.votes then admitted = false end", ""),
];

/// The comparison would notice: each of these faults, planted in the script, is found.
#[test]
fn planted_faults_are_found() {
    find(&PLANTED[..PLANTED.len() / 2]);
}

#[test]
fn more_planted_faults_are_found() {
    find(&PLANTED[PLANTED.len() / 2..]);
}

/// However much is debited, a log keeps no more entries than it may.
#[test]
fn a_log_has_a_bound() {
    let redis = Redis::start();
    let mut twins = Twins::new(&redis, |script| script);
    let now = Timestamp::from_micros(1_764_000_000_000_000);
    let limit = Limit::SlidingLog(SlidingLog { limit: 5, window: 1_000_000 });
    for round in 1..=4 {
        let debit = Check { demand: Demand::Debit, limit, ..check("log", 1, "1", 4_000) };
        let entries = debit.key.as_str().to_owned();
        twins.agree(&[[debit].into_iter().collect()], now.plus_micros(round)).unwrap();
        let kept: u64 = redis::cmd("ZCARD").arg(entries).query(&mut twins.connection).unwrap();
        assert_eq!(kept, (round * 4_000).min(10_000));
    }
}

fn find(planted: &[(&str, &str)]) {
    let redis = Redis::start();
    let differ_with = |from: &str, to: &str| {
        let mut twins = Twins::new(&redis, |script| script.replacen(from, to, 1));
        (1..=200).find_map(|seed| twins.run(seed, 200).err())
    };
    assert_eq!(differ_with("", ""), None, "without a fault");
    let mut missed = Vec::new();
    for (from, to) in planted {
        assert!(SOURCE.contains(from), "no longer in the script: {from}");
        if differ_with(from, to).is_none() {
            missed.push(format!("{from} -> {to}"));
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:#?}");
}
