//! JSON values that are kept as they are: those of fields without a type of their own.

use std::fmt;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::intake::{Intake, Seed, Text};
use crate::error::ApiError;

/// Lists and objects within each other. The parser itself stops at 128, the body and its messages
/// included.
const MAX_DEPTH: usize = 64;

/// What an entry of an object takes beside the content of key and value: its place in the list of
/// entries and in the table that finds it, both of which grow by doubling.
const ENTRY_BYTES: u64 = 2 * (size_of::<(u64, String, Value)>() + 2 * size_of::<usize>()) as u64;

impl Intake {
    /// Adds an entry to an object.
    pub fn insert<E: Error>(
        &mut self,
        object: &mut Map<String, Value>,
        name: &str,
        value: Value,
    ) -> Result<(), E> {
        // There is room for four from the first one on.
        self.take(if object.is_empty() { 4 } else { 1 } * ENTRY_BYTES)?;
        object.insert(self.own(name)?, value);
        Ok(())
    }

    fn deeper<E: Error>(&mut self) -> Result<(), E> {
        self.depth += 1;
        if self.depth <= MAX_DEPTH {
            return Ok(());
        }
        let message = format!("lists and objects are more than {MAX_DEPTH} deep");
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
        self.intake.own(text).map(Value::String)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let intake = self.intake;
        intake.count_value()?;
        intake.deeper()?;
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
        intake.deeper()?;
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

    /// Bytes on the heap, by what the standard library tells of its own capacities.
    fn heap(value: &Value) -> usize {
        match value {
            Value::String(text) => text.capacity(),
            Value::Array(list) => {
                list.capacity() * size_of::<Value>() + list.iter().map(heap).sum::<usize>()
            }
            Value::Object(object) => {
                let entry = |(name, value): (&String, &Value)| {
                    size_of::<(u64, String, Value)>() + name.capacity() + heap(value)
                };
                object.iter().map(entry).sum()
            }
            _ => 0,
        }
    }

    /// The body of a request with `value` in a field.
    fn body(value: &Value) -> Value {
        json!({"messages": [{"role": "user", "content": "x"}], "metadata": value})
    }

    fn read(intake: &mut Intake) -> Result<(), ApiError> {
        request::read::<Messages>(intake).map(drop)
    }

    #[test]
    fn no_less_is_counted_than_what_is_built() {
        let lists = json!(vec![json!([[], [[]], [1, 2, 3, 4, 5]]); 100]);
        let objects = json!(vec![json!({"a": {}, "b": {"c": null}}); 100]);
        let names: Map<String, Value> =
            (0..1000).map(|i| (format!("name-{i}"), json!(i))).collect();
        for value in
            [lists, objects, json!(names), json!("x".repeat(10_000)), json!("\n\"".repeat(5_000))]
        {
            let (mut counted, mut empty) =
                (Intake::of(&body(&value)), Intake::of(&body(&Value::Null)));
            read(&mut counted).unwrap();
            read(&mut empty).unwrap();
            let counted = counted.into_charge().bytes() - empty.into_charge().bytes();
            let built: Value = serde_json::from_str(&value.to_string()).unwrap();
            assert!(counted + 1024 >= heap(&built) as u64, "{counted} for {}", heap(&built));
        }
    }

    #[test]
    fn values_and_depth_are_bounded_and_the_field_is_named() {
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
    fn a_byte_order_mark_is_no_part_of_a_body() {
        let read_all = |text: String| {
            read(&mut Intake::new(text.into(), &BodyLimits::default(), &ByteBudget::new(1 << 20)))
        };
        let value = body(&json!("x".repeat(100))).to_string();
        assert!(read_all(format!("\u{feff}{value}")).is_ok());
        let error = read_all(format!("\u{feff}\u{feff}{value}")).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
    }

    #[test]
    fn what_has_no_room_is_refused_for_now_and_what_never_has_for_good() {
        let (value, budget) = (body(&json!(vec![0; 1000])), ByteBudget::new(200_000));
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
