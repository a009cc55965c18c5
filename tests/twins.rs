//! The twins: the Lua script on a real Redis and the Rust code give the same verdicts on the same
//! random traces, with rules that change in between.
//!
//! Both run on virtual time. For Redis a prelude stands in for `lua/clock.lua`: it takes the time from
//! the last argument, and keeps expiries in it as well. The rest of the script is the one that ships.

use std::sync::Arc;

use tollgate::clock::{ManualClock, Timestamp};
use tollgate::rule::{Check, Checks, Demand};
use tollgate::store::memory::MemoryStore;
use tollgate::store::redis::script::{Flight, SOURCE};

use crate::contract::check;
use crate::harness::{Random, Redis};

const PRELUDE: &str = "
local now = tonumber(table.remove(ARGV))
local real = redis
local redis = {
  call = function(command, key, value, ...)
    if command == 'PTTL' then
      local expiry = real.call('HGET', key, 'exp')
      return expiry and math.floor((tonumber(expiry) - now) / 1000) or -1
    end
    return real.call(command, key, value, ...)
  end,
  pcall = function(command, key, value, ...)
    if command == 'PEXPIRE' then
      return real.call('HSET', key, 'exp', string.format('%.0f', now + tonumber(value) * 1000))
    elseif command == 'HMGET' then
      local expiry = real.call('HGET', key, 'exp')
      if expiry and tonumber(expiry) <= now then real.call('DEL', key) end
    end
    return real.pcall(command, key, value, ...)
  end,
}
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
        let mut rules: Vec<(u64, &str)> = vec![(20, "10"); 12];
        let mut requests = 0;
        for _ in 0..flights {
            if random.below(20) == 0 {
                let rule = random.below(rules.len() as u64) as usize;
                rules[rule] = (random.choose(&CAPACITIES), random.choose(&RATES));
            }
            now = match random.below(40) {
                0 => now.minus_micros(random.below(3_000_000)),
                1 => now.plus_micros(random.below(86_400_000_000 * 40)),
                2..10 => now.plus_micros(random.below(3_000_000)),
                10..20 => now.plus_micros(random.below(20_000)),
                _ => now,
            };
            let flight: Vec<Checks> = (0..=random.below(8)).map(|_| request(&mut random, &rules)).collect();
            requests += flight.len();
            self.agree(&flight, now).map_err(|difference| format!("seed {seed}: {difference}"))?;
        }
        Ok(requests)
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

/// One to three different buckets.
fn request(random: &mut Random, rules: &[(u64, &str)]) -> Checks {
    let first = random.below(rules.len() as u64) as usize;
    let count = random.choose(&[1, 1, 1, 2, 3]);
    let one = |offset: usize, random: &mut Random| -> Check {
        let bucket = (first + offset * 3) % rules.len();
        let (capacity, rate) = rules[bucket];
        let cost = match random.below(10) {
            0 => 0,
            1 => random.below(capacity.saturating_add(2)),
            2 => capacity,
            _ => 1 + random.below(3),
        };
        let demand = match random.below(10) {
            0 => Demand::Debit,
            1 => Demand::Shadow,
            2 => Demand::Lease,
            3 => Demand::Return,
            _ => Demand::Take,
        };
        // A debit may come from an older rule than the one of the day.
        let capacity =
            if demand == Demand::Debit && random.below(2) == 0 { capacity.div_ceil(3) } else { capacity };
        let cost = if demand == Demand::Debit { cost.max(1) } else { cost };
        Check { demand, ..check(&format!("b{bucket}"), capacity, rate, cost) }
    };
    (0..count).map(|offset| one(offset, random)).collect()
}

#[test]
fn random_traces_give_the_same_verdicts() {
    let redis = Redis::start();
    let mut requests = 0;
    for seed in 1..=25 {
        let mut twins = Twins::new(&redis, |script| script);
        requests += twins.run(seed, 1_000).unwrap_or_else(|difference| panic!("{difference}"));
    }
    assert!(requests > 100_000, "{requests}");
}

/// The comparison would notice: each of these faults, planted in the script, is found.
#[test]
fn planted_faults_are_found() {
    let redis = Redis::start();
    for (from, to) in [
        ("if question.cost > units and question.votes", "if question.cost >= units and question.votes"),
        ("if question.cost > units and question.votes", "if question.cost > units"),
        ("elseif cost > units and", "elseif cost >= units and"),
        ("elseif cost > units and cost > 0", "elseif cost > units"),
        ("elseif (admitted or question.shadow) and cost > 0", "elseif cost > 0"),
        ("(admitted or question.shadow)", "admitted"),
        ("return units, now - floor((part - partial * d) / n)", "return units, now"),
        ("    return units, at\n  end", "    return units, now\n  end"),
        ("if -elapsed > time_to_earn(capacity, n, d) then at = now end", ""),
        ("whole * d + ceil((need", "whole * d + floor((need"),
        ("time = ceil(need / n)", "time = floor(need / n)"),
        ("units = units + elapsed * n\n", "units = units + (elapsed - 1) * n\n"),
        ("    units = capacity\n  end", "  end"),
        ("if question.debit then return units, elapsed > 0 and now or at end", ""),
        ("math.max(units - cost, math.min(units, question.lowest))", "units - cost"),
        (
            "math.max(units - cost, math.min(units, question.lowest))",
            "math.max(units - cost, question.lowest)",
        ),
        ("math.max(units - cost, math.min(units, question.lowest))", "math.max(units - cost, 0)"),
        ("if units < question.least then units = question.least end", ""),
        ("demand == 'debit' and capacity - EXACT or lowest", "lowest"),
        ("sign = -units, '-'", "sign = -units, ''"),
        ("math.min(capacity, EXACT - capacity)", "capacity"),
        ("and call('PTTL', KEYS[key + i]) < reset", "and false"),
        ("(code == 0 or code == 3 and retry == 0)", "code == 0"),
        ("units - units % question.scale", "units"),
        ("math.min(cost, units - units", "math.min(cost + question.scale, units - units"),
        ("units = units - retry * question.scale", ""),
        ("units = math.min(units + cost, capacity)", "units = units + cost"),
    ] {
        assert!(SOURCE.contains(from), "no longer in the script: {from}");
        let mut twins = Twins::new(&redis, |script| script.replacen(from, to, 1));
        let found = (1..=200).any(|seed| twins.run(seed, 200).is_err());
        assert!(found, "not noticed: {from} -> {to}");
    }
}
