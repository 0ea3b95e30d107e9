//! JSON values of fields without their own type, which are kept as they are.

use std::fmt;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::intake::{Intake, Seed, Text};
use crate::error::ApiError;

/// The maximum nesting depth of lists and objects. The parser itself stops at 128, which includes
/// the body and its messages.
const MAX_DEPTH: usize = 64;

/// The memory of an object's entry besides the content of key and value: its places in the entry
/// list and in the hash table, both of which grow by doubling.
const ENTRY_BYTES: u64 = 2 * (size_of::<(u64, String, Value)>() + 2 * size_of::<usize>()) as u64;

impl Intake {
    /// Adds an entry to an object and reserves its memory.
    pub fn insert<E: Error>(
        &mut self,
        object: &mut Map<String, Value>,
        name: &str,
        value: Value,
    ) -> Result<(), E> {
        // The first entry allocates room for four.
        self.reserve(if object.is_empty() { 4 } else { 1 } * ENTRY_BYTES)?;
        object.insert(self.copy_text(name)?, value);
        Ok(())
    }

    /// Enters a list or an object.
    fn enter_nested<E: Error>(&mut self) -> Result<(), E> {
        self.depth += 1;
        if self.depth <= MAX_DEPTH {
            return Ok(());
        }
        let message = format!("lists and objects are nested more than {MAX_DEPTH} levels deep");
        Err(self.refuse_here(|field| ApiError::invalid(field, message)))
    }
}

impl<'de> Visitor<'de> for Seed<'_, Value> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.intake.count_value().map(|()| Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.intake.count_value().map(|()| Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.intake.count_value().map(|()| Value::Number(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.intake.count_value().map(|()| Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.intake
            .count_value()
            .map(|()| Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        self.intake.count_value()?;
        self.intake.copy_text(text).map(Value::String)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let intake = self.intake;
        intake.count_value()?;
        intake.enter_nested()?;
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(intake.seed::<Value>())? {
            intake.push(&mut list, value)?;
        }
        intake.depth -= 1;
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let intake = self.intake;
        intake.count_value()?;
        intake.enter_nested()?;
        let mut object = Map::new();
        while let Some(Text(name)) = map.next_key()? {
            let value = map.next_value_seed(intake.seed::<Value>())?;
            intake.insert(&mut object, &name, value)?;
        }
        intake.depth -= 1;
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use chiasm_media::ByteBudget;
    use serde_json::json;

    use super::super::messages::Messages;
    use super::super::request;
    use super::*;
    use crate::ErrorKind;
    use crate::openai::BodyLimits;

    /// Returns the bytes on the heap, by the capacities of the standard library's collections.
    fn heap_bytes(value: &Value) -> usize {
        match value {
            Value::String(text) => text.capacity(),
            Value::Array(list) => {
                list.capacity() * size_of::<Value>() + list.iter().map(heap_bytes).sum::<usize>()
            }
            Value::Object(object) => {
                let entry = |(name, value): (&String, &Value)| {
                    size_of::<(u64, String, Value)>() + name.capacity() + heap_bytes(value)
                };
                object.iter().map(entry).sum()
            }
            _ => 0,
        }
    }

    /// Returns the body of a request with `value` in a field.
    fn body(value: &Value) -> Value {
        json!({"messages": [{"role": "user", "content": "x"}], "metadata": value})
    }

    fn read(intake: &mut Intake) -> Result<(), ApiError> {
        request::read::<Messages>(intake).map(drop)
    }

    #[test]
    fn reserved_memory_covers_built_values() {
        let lists = json!(vec![json!([[], [[]], [1, 2, 3, 4, 5]]); 100]);
        let objects = json!(vec![json!({"a": {}, "b": {"c": null}}); 100]);
        let names: Map<String, Value> =
            (0..1000).map(|i| (format!("name-{i}"), json!(i))).collect();
        for value in
            [lists, objects, json!(names), json!("x".repeat(10_000)), json!("\n\"".repeat(5_000))]
        {
            let mut with_value = Intake::from_json(&body(&value));
            let mut without_value = Intake::from_json(&body(&Value::Null));
            read(&mut with_value).unwrap();
            read(&mut without_value).unwrap();
            let reserved = with_value.into_charge().bytes() - without_value.into_charge().bytes();
            let built: Value = serde_json::from_str(&value.to_string()).unwrap();
            let needed = heap_bytes(&built) as u64;
            assert!(reserved + 1024 >= needed, "{reserved} for {needed}");
        }
    }

    #[test]
    fn excess_values_or_depth_name_the_field() {
        let limits = BodyLimits { json_values: 10, ..BodyLimits::default() };
        let outcome = |value: &Value| {
            let mut intake =
                Intake::new(body(value).to_string().into(), &limits, &ByteBudget::new(1 << 20));
            read(&mut intake).map_err(|error| (error.kind, error.param.unwrap()))
        };
        assert_eq!(outcome(&json!([1, 2, 3, 4, 5, 6, 7, 8, 9])), Ok(()));
        let too_many = Err((ErrorKind::TooLarge, "metadata".to_owned()));
        assert_eq!(outcome(&json!([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])), too_many);
        assert_eq!(outcome(&json!({"a": [{}, {}, {}], "b": [[], [], []], "c": [1]})), too_many);
        let limits = BodyLimits::default();
        let nested = |depth: usize| {
            let text =
                format!("{{\"x\": {}{}, \"messages\": []}}", "[".repeat(depth), "]".repeat(depth));
            let mut intake = Intake::new(text.into(), &limits, &ByteBudget::new(1 << 20));
            read(&mut intake).unwrap_err().param.unwrap()
        };
        assert_eq!(nested(MAX_DEPTH), "messages");
        assert_eq!(nested(MAX_DEPTH + 1), "x");
        assert_eq!(nested(100_000), "x");
    }

    #[test]
    fn byte_order_mark_is_skipped() {
        let read_all = |text: String| {
            read(&mut Intake::new(text.into(), &BodyLimits::default(), &ByteBudget::new(1 << 20)))
        };
        let value = body(&json!("x".repeat(100))).to_string();
        assert!(read_all(format!("\u{feff}{value}")).is_ok());
        let error = read_all(format!("\u{feff}\u{feff}{value}")).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
    }

    #[test]
    fn only_oversized_request_is_refused_for_good() {
        let value = body(&json!(vec![0; 1000]));
        let budget = ByteBudget::new(200_000);
        let outcome = || {
            read(&mut Intake::new(value.to_string().into(), &BodyLimits::default(), &budget))
                .map_err(|error| error.kind)
        };
        assert_eq!(outcome(), Ok(()));
        let others = budget.charge(150_000).unwrap();
        assert_eq!(outcome(), Err(ErrorKind::Unavailable));
        drop(others);
        assert_eq!(budget.held(), 0);
        let value = body(&json!(vec![0; 10_000]));
        let error =
            read(&mut Intake::new(value.to_string().into(), &BodyLimits::default(), &budget))
                .unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::TooLarge, Some("metadata")));
    }
}
