use super::*;

fn flight(requests: usize) -> Flight {
    use crate::config::OnStoreFailure;
    use crate::key::{Hasher, Key, Part};
    use crate::limit::token_bucket::TokenBucket;
    use crate::rule::{Check, Demand, RuleId};
    let part = Part::known(b"a", &Hasher::new(b""));
    let check = Check {
        rule: RuleId::TENANT,
        key: Key::tenant_route("rl", &part, &part),
        limit: Limit::TokenBucket(TokenBucket::new(20, "10".parse().unwrap()).unwrap()),
        shards: 1,
        permit: 0,
        cost: 1,
        demand: Demand::Take,
        on_store_failure: OnStoreFailure::Local,
    };
    let mut flight = Flight::new();
    for _ in 0..requests {
        flight.board(smallvec::smallvec![check.clone()]);
    }
    flight
}

fn reply(numbers: &[i64]) -> Value {
    Value::Array(numbers.iter().map(|number| Value::Int(*number)).collect())
}

fn kinds(flight: &Flight, reply: &Value) -> Vec<&'static str> {
    flight
        .answers(reply)
        .iter()
        .map(|answer| answer.as_ref().map_or_else(StoreFault::kind, |_| "ok"))
        .collect()
}

/// B051: the script touches no key that it was not given.
#[test]
fn every_key_of_the_script_is_declared() {
    let calls: Vec<&str> = SOURCE.match_indices("call('").map(|(at, _)| &SOURCE[at..]).collect();
    assert_eq!(calls.len(), 30);
    for call in calls {
        let allowed = [
            "'TIME')",
            "'HMGET', key,",
            "'HSET', key,",
            "'PEXPIRE', key,",
            "'PTTL', KEYS[key + i])",
            "'PTTL', key)",
            "'PEXPIRE', KEYS[key + i],",
            "'ZADD', key,",
            "'ZCOUNT', key,",
            "'ZRANGE', key,",
            "'ZRANGEBYSCORE', key,",
            "'ZREM', key,",
            "'ZREMRANGEBYRANK', key,",
            "'ZREMRANGEBYSCORE', key,",
            "'ZSCORE', key,",
        ];
        assert!(allowed.iter().any(|with| call["call(".len()..].starts_with(with)), "{call:.60}");
    }
    for line in SOURCE.lines().filter(|line| line.contains("refilled(") || line.contains("store(")) {
        assert!(line.contains("KEYS[key + i]") || line.contains("local function"), "{line}");
    }
}

/// B043: no number reaches a command as Lua would write it.
#[test]
fn numbers_are_formatted_before_they_are_stored() {
    let formatted =
        ["unpack(words)", "as_tokens(units, question.scale), 'ts', ts)", "now_text", "format('%.0f'"];
    for line in SOURCE.lines().filter(|line| line.contains("'HSET'") || line.contains("'ZADD'")) {
        assert!(formatted.iter().any(|form| line.contains(form)), "{line}");
    }
    for line in SOURCE.lines().filter(|line| line.contains("words[#words + 1] =")) {
        assert!(line.ends_with("= now_text") || line.contains("= format('%s-%05d', now_text,"), "{line}");
    }
    let made = SOURCE.lines().filter(|line| line.contains("return format(") || line.contains("local ts = "));
    let made: Vec<&str> = made.collect();
    assert_eq!(made.len(), 4, "{made:?}");
    for line in made {
        assert!(line.contains("%d"), "{line}");
    }
}

/// B055: nil, wrong type, error, empty, extra or missing elements: a fault, never a decision.
#[test]
fn a_reply_of_the_wrong_shape_is_a_fault() {
    let one = flight(1);
    assert_eq!(kinds(&one, &reply(&[1, 1, 19, 0, 100])), ["ok"]);
    for bad in [
        Value::Nil,
        Value::Okay,
        Value::Int(1),
        Value::BulkString(b"OK".to_vec()),
        Value::Array(vec![]),
        reply(&[1, 1, 19, 0]),
        reply(&[1, 1, 19, 0, 100, 7]),
        reply(&[1, 9, 19, 0, 100]),
        reply(&[1, 1, -19, 0, 100]),
        Value::Array(vec![Value::Int(1), Value::Int(1), Value::Nil, Value::Int(0), Value::Int(0)]),
    ] {
        assert_eq!(kinds(&one, &bad), ["bad_reply"], "{bad:?}");
    }
    assert_eq!(kinds(&flight(2), &Value::Nil), ["bad_reply", "bad_reply"]);
}

#[test]
fn a_fault_of_one_request_is_not_its_neighbours() {
    let text = |text: &str| Value::BulkString(text.into());
    let numbers = vec![
        Value::Int(1),
        Value::Int(-1),
        text("WRONGTYPE Operation against a key holding the wrong kind of value"),
        Value::Int(0),
        Value::Int(0),
        Value::Int(0),
        Value::Int(0),
        Value::Int(1_000),
        Value::Int(2_000),
    ];
    let flight = flight(2);
    assert_eq!(kinds(&flight, &Value::Array(numbers.clone())), ["wrong_type", "ok"]);
    let answers = flight.answers(&Value::Array(numbers));
    assert_eq!(answers[1].as_ref().unwrap()[0].retry_after_ms, 1_000);
}
