//! The slots of a cluster: which one a key is in, and which shard has it. Pure.

use std::ops::RangeInclusive;
use std::str;

use crc::{CRC_16_XMODEM, Crc};
use redis::Value;

use super::access::Address;

/// How many slots a cluster has.
pub(super) const COUNT: usize = 16_384;

/// The checksum of the specification of Redis Cluster.
const CRC16: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// The slot of a key: of its hash tag, if it has one that is not empty.
pub(super) fn slot_of(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let hashed = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
    CRC16.checksum(hashed.as_bytes()) % COUNT as u16
}

/// A master, those who follow it, and the slots it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) master: Address,
    pub(super) replicas: Vec<Address>,
    pub(super) slots: Vec<RangeInclusive<u16>>,
}

impl Shard {
    /// Whether it has that slot.
    pub(super) fn has(&self, slot: u16) -> bool {
        self.slots.iter().any(|slots| slots.contains(&slot))
    }
}

/// Reads the answer to CLUSTER SLOTS of the node at `asked`; `None` if it is not one.
pub(super) fn shards(reply: &Value, asked: &Address) -> Option<Vec<Shard>> {
    let Value::Array(ranges) = reply else { return None };
    let mut shards: Vec<Shard> = Vec::new();
    for range in ranges {
        let Value::Array(fields) = range else { return None };
        let [Value::Int(first), Value::Int(last), nodes @ ..] = &fields[..] else { return None };
        let slots = u16::try_from(*first).ok()?..=u16::try_from(*last).ok()?;
        if usize::from(*slots.end()) >= COUNT || slots.is_empty() {
            return None;
        }
        let mut nodes = nodes.iter().map(|node| address(node, asked));
        let master = nodes.next()??;
        let replicas = nodes.collect::<Option<Vec<_>>>()?;
        match shards.iter_mut().find(|shard| shard.master == master) {
            Some(shard) => shard.slots.push(slots),
            None => shards.push(Shard { master, replicas, slots: vec![slots] }),
        }
    }
    Some(shards)
}

/// A node of the answer. One that does not know its own host says none: it is where it was asked.
fn address(node: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(fields) = node else { return None };
    let (host, Value::Int(port)) = (fields.first()?, fields.get(1)?) else { return None };
    let host = match (host, asked) {
        (Value::BulkString(host), _) if !host.is_empty() && host != b"?" => str::from_utf8(host).ok()?,
        (_, Address::Tcp { host, .. }) => host,
        _ => return None,
    };
    Some(Address::tcp(host, u16::try_from(*port).ok()?))
}

/// A shard as it was known.
pub(super) struct Known {
    pub(super) master: Option<Address>,
    pub(super) replicas: Vec<Address>,
}

impl Known {
    fn is(&self, shard: &Shard) -> bool {
        self.master.as_ref() == Some(&shard.master)
    }

    /// Whether the two have changed places, or one has followed the other.
    fn became(&self, shard: &Shard) -> bool {
        let follows = self.master.as_ref().is_some_and(|master| shard.replicas.contains(master));
        follows || self.replicas.contains(&shard.master)
    }
}

/// For each shard of `new` the one of `known` that it goes on as: the same master, or, after a failover, one
/// that followed it. Each of them is taken once.
pub(super) fn heirs(known: &[Known], new: &[Shard]) -> Vec<Option<usize>> {
    let mut heirs: Vec<Option<usize>> = vec![None; new.len()];
    for goes_on_as in [Known::is, Known::became] {
        for (position, shard) in new.iter().enumerate() {
            if heirs[position].is_none() {
                let free =
                    |index: &usize| !heirs.contains(&Some(*index)) && goes_on_as(&known[*index], shard);
                heirs[position] = (0..known.len()).find(free);
            }
        }
    }
    heirs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Hasher, Key, Part};

    /// As Redis says it itself (`CLUSTER KEYSLOT`).
    #[test]
    fn slots_are_those_of_redis() {
        for (key, slot) in [
            ("123456789", 12_739),
            ("foo", 12_182),
            ("rl:{foo}:create-order", 12_182),
            ("{foo}{bar}", 12_182),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("", 0),
        ] {
            assert_eq!(slot_of(key), slot, "{key}");
        }
    }

    /// B053: clients of one rule spread over all shards, known and unknown tenants alike.
    #[test]
    fn clients_spread_over_the_shards() {
        let hasher = Hasher::new(b"secret");
        let route = Part::known(b"all", &hasher);
        let spread = |tenant: &dyn Fn(u32) -> Part| {
            let mut shards = [0; 3];
            for number in 0..10_000 {
                let key = Key::tenant_route("rl", &tenant(number), &route);
                shards[usize::from(slot_of(key.as_str())) * 3 / COUNT] += 1;
            }
            shards
        };
        let unknown = spread(&|number| hasher.part(format!("client-{number}").as_bytes()));
        let known = spread(&|number| Part::known(format!("client-{number}").as_bytes(), &hasher));
        for count in unknown.into_iter().chain(known) {
            assert!((3_000..=3_667).contains(&count), "{unknown:?} {known:?}");
        }
    }

    fn at(port: u16) -> Address {
        Address::tcp("10.0.0.1", port)
    }

    fn shard(master: u16, replicas: &[u16], slots: RangeInclusive<u16>) -> Shard {
        Shard {
            master: at(master),
            replicas: replicas.iter().map(|port| at(*port)).collect(),
            slots: vec![slots],
        }
    }

    #[test]
    fn an_answer_is_read() {
        let node =
            |host: Value, port| Value::Array(vec![host, Value::Int(port), Value::BulkString("id".into())]);
        let named = |port| node(Value::BulkString("10.0.0.1".into()), port);
        let range = |first, last, nodes: Vec<Value>| {
            Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat())
        };
        let reply = Value::Array(vec![
            range(0, 99, vec![named(1), named(4)]),
            range(200, 16_383, vec![named(1), named(4)]),
            range(100, 199, vec![node(Value::Nil, 2)]),
        ]);
        let mut first = shard(1, &[4], 0..=99);
        first.slots.push(200..=16_383);
        assert_eq!(shards(&reply, &at(9)), Some(vec![first, shard(2, &[], 100..=199)]));
        for nonsense in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(5, 4, vec![named(1)])]),
            Value::Array(vec![range(0, 16_384, vec![named(1)])]),
            Value::Array(vec![range(-1, 3, vec![named(1)])]),
            Value::Array(vec![range(0, 3, vec![])]),
            Value::Array(vec![range(0, 3, vec![node(Value::Nil, 70_000)])]),
        ] {
            assert_eq!(shards(&nonsense, &at(9)), None, "{nonsense:?}");
        }
    }

    #[test]
    fn a_shard_outlives_its_master() {
        let shard_at = |master, replicas| Known { master, replicas };
        let known =
            [shard_at(Some(at(1)), vec![at(4)]), shard_at(Some(at(2)), vec![at(5)]), shard_at(None, vec![])];
        let new = [
            shard(2, &[5], 0..=99),
            // The master has failed, and its replica is one now.
            shard(4, &[1], 100..=199),
            shard(7, &[], 200..=299),
        ];
        assert_eq!(heirs(&known, &new), [Some(1), Some(0), None]);
        // A replica was made a master beside the one it followed.
        assert_eq!(heirs(&known, &[shard(4, &[], 0..=1), shard(1, &[], 2..=3)]), [None, Some(0)]);
        assert_eq!(heirs(&[], &new), [None, None, None]);
    }
}
