//! A request's LoRA adapter.

use rmpv::Value;

use super::codec::{Fields, Wire};
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::writer::Writer;

/// `LoRARequest` in `vllm/lora/request.py`: an array whose first three fields are the same in all
/// versions. The other fields have defaults and are at other positions in 0.31, so
/// `base_model_name`, `load_inplace` and `is_3d_lora_weight` are not sent.
///
/// A request that the engine can't decode kills its input thread. The id must therefore be at
/// least 1, and the path must not be empty. The engine's runners store the id in a signed 32-bit
/// integer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoraRequest {
    /// The name, which is part of the keys of KV cache blocks. Two adapters of one batch with the
    /// same name kill the engine.
    pub name: String,
    /// The key of loaded adapters in the engine. An adapter that is loaded is not read again.
    pub id: u32,
    /// The folder of the adapter. The engine takes a relative path that does not exist for the id
    /// of a model on the hub.
    pub path: String,
}

/// The fault of a [`LoraRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A value of another type. The text is msgspec's.
    #[error("Expected `array`")]
    NotAnArray,
    /// An id that an engine's runners can't store.
    #[error("its id must be from 1 to {}", LoraRequest::MAX_ID)]
    Id,
    /// An empty name or path.
    #[error("its name and path must not be empty")]
    Empty,
}

impl LoraRequest {
    /// The largest id.
    pub const MAX_ID: u32 = i32::MAX as u32;

    /// Checks that the engine can decode the request.
    ///
    /// # Errors
    /// The id is out of range, or the name or path is empty.
    pub(crate) fn validate(&self) -> Result<(), LoraError> {
        if !(1..=Self::MAX_ID).contains(&self.id) {
            return Err(LoraError::Id);
        }
        if self.name.is_empty() || self.path.is_empty() {
            return Err(LoraError::Empty);
        }
        Ok(())
    }

    /// Encodes the request as an argument of a method call.
    pub fn to_value(&self) -> Value {
        Value::Array(vec![self.name.as_str().into(), self.id.into(), self.path.as_str().into()])
    }

    /// Decodes an argument that [`to_value`](Self::to_value) encoded: the engine's side.
    ///
    /// # Errors
    /// The value is not an array, or the request is not valid. An id or text of another type counts
    /// as 0 or empty.
    pub fn from_value(value: &Value) -> Result<Self, LoraError> {
        let fields = value.as_array().ok_or(LoraError::NotAnArray)?;
        let text =
            |index: usize| fields.get(index).and_then(Value::as_str).unwrap_or_default().to_owned();
        let id = fields
            .get(1)
            .and_then(Value::as_u64)
            .and_then(|id| u32::try_from(id).ok())
            .unwrap_or(0);
        let request = Self { name: text(0), id, path: text(2) };
        request.validate()?;
        Ok(request)
    }
}

impl Wire for LoraRequest {
    fn write(&self, to: &mut Writer) {
        to.array(3);
        self.name.write(to);
        self.id.write(to);
        self.path.write(to);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut fields = Fields::open(from, 2)?;
        let name = fields.next(from).named("lora_name")?;
        let id = fields.next(from).named("lora_int_id")?;
        let path = fields.next(from).named("lora_path")?;
        fields.close(from)?;
        let request = Self { name, id, path };
        match request.validate() {
            Ok(()) => Ok(request),
            Err(error) => Err(Problem::Unsupported(error.to_string()).at("")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::wire::{ClientMessage, EngineCoreRequest, request};

    fn lora(id: u32) -> LoraRequest {
        LoraRequest { name: "a@1".to_owned(), id, path: "/a".to_owned() }
    }

    #[test]
    fn lora_request_round_trips() {
        let add = EngineCoreRequest {
            lora_request: Some(Arc::new(lora(7))),
            ..EngineCoreRequest::default()
        };
        let ClientMessage::Add(read) = request::decode(&request::encode(&add)).unwrap() else {
            panic!("an ADD")
        };
        assert_eq!(read.lora_request, add.lora_request);
        assert_eq!(LoraRequest::from_value(&lora(7).to_value()), Ok(lora(7)));
    }

    #[test]
    fn invalid_lora_request_is_refused() {
        for invalid in
            [lora(0), lora(LoraRequest::MAX_ID + 1), LoraRequest { path: String::new(), ..lora(1) }]
        {
            assert!(
                invalid.validate().is_err()
                    && LoraRequest::from_value(&invalid.to_value()).is_err(),
                "{invalid:?}"
            );
            let add = EngineCoreRequest {
                lora_request: Some(Arc::new(invalid)),
                ..EngineCoreRequest::default()
            };
            let error = request::decode(&request::encode(&add)).unwrap_err().to_string();
            assert!(error.contains("lora_request"), "{error}");
        }
        assert!(LoraRequest::from_value(&Value::Nil).is_err());
    }
}
