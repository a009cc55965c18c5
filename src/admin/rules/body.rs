//! The body of a request that says a rule: a JSON object in which no key stands twice.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Any JSON, in which no object has a key twice: which of the two was meant, nobody could tell.
struct Unambiguous(Value);

/// The fields of a JSON object.
///
/// # Errors
/// What is wrong with it, with its line and column.
pub(super) fn object(body: &[u8]) -> Result<Map<String, Value>, String> {
    match serde_json::from_slice(body) {
        Ok(Unambiguous(Value::Object(fields))) => Ok(fields),
        Ok(_) => Err("expected an object such as {\"capacity\": 200, \"refill_per_second\": 100}".into()),
        Err(error) if error.is_data() => Err(error.to_string()),
        Err(error) => Err(format!("not JSON: {error}")),
    }
}

impl<'de> Deserialize<'de> for Unambiguous {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Unambiguous;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Unambiguous, E> {
        Ok(Unambiguous(Value::Null))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Unambiguous, A::Error> {
        let mut all = Vec::new();
        while let Some(Unambiguous(item)) = items.next_element()? {
            all.push(item);
        }
        Ok(Unambiguous(all.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Unambiguous, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if fields.contains_key(&key) {
                return Err(A::Error::custom(format_args!("`{key}` is there twice")));
            }
            let Unambiguous(value) = entries.next_value()?;
            fields.insert(key, value);
        }
        Ok(Unambiguous(fields.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_stands_twice() {
        let read = |body: &str| object(body.as_bytes());
        let fields =
            read(r#"{"capacity": 9007199254740993, "candidate": {"capacity": 1.5}, "x": [null, true]}"#);
        assert_eq!(fields.unwrap()["capacity"], 9_007_199_254_740_993_u64);
        assert_eq!(read("{\"a\": 1,\n\"a\": 1}").unwrap_err(), "`a` is there twice at line 2 column 3");
        assert!(read(r#"{"candidate": {"a": 1, "a": 2}}"#).unwrap_err().starts_with("`a` is there twice"));
        assert!(read("[]").unwrap_err().starts_with("expected an object"));
        assert!(read("{").unwrap_err().starts_with("not JSON: "));
    }
}
