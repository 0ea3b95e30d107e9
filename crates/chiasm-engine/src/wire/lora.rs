//! A request's LoRA adapter.

use rmpv::Value;

use super::codec::{Fields, Wire};
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::writer::Writer;

/// `LoRARequest` in `vllm/lora/request.py`: an array, of which the first three fields are the same
/// in all versions. What follows has defaults, and other places in 0.31: `base_model_name`,
/// `load_inplace` and `is_3d_lora_weight` are not sent.
///
/// An engine that can't decode one goes deaf, so the id has to be at least 1 and the path must not
/// be empty. Its runners keep the id in 32 bits with a sign.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoraRequest {
    /// What blocks are kept apart by. Adapters of one batch that share it are one to the engine,
    /// and it dies.
    pub name: String,
    /// What the engine finds a loaded adapter by: one that is loaded is not looked at again.
    pub id: u32,
    /// The folder of the adapter. One that is relative and not there is taken for the id of a model
    /// on the hub.
    pub path: String,
}

/// The fault of a [`LoraRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A value of another type. The words are msgspec's.
    #[error("Expected `array`")]
    NotAnArray,
    /// An id that an engine's runners can't keep.
    #[error("its id must be from 1 to {}", LoraRequest::MAX_ID)]
    Id,
    /// No name or no path.
    #[error("its name and path must not be empty")]
    Empty,
}

impl LoraRequest {
    /// The largest id.
    pub const MAX_ID: u32 = i32::MAX as u32;

    /// What the engine would go deaf of.
    pub(crate) fn problem(&self) -> Option<LoraError> {
        match self {
            Self { id, .. } if !(1..=Self::MAX_ID).contains(id) => Some(LoraError::Id),
            Self { name, path, .. } if name.is_empty() || path.is_empty() => Some(LoraError::Empty),
            _ => None,
        }
    }

    /// The same as an argument of a method.
    pub fn to_value(&self) -> Value {
        Value::Array(vec![self.name.as_str().into(), self.id.into(), self.path.as_str().into()])
    }

    /// The engine's side of [`Self::to_value`].
    ///
    /// # Errors
    /// What msgspec would refuse, or what follows from it.
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
        request.problem().map_or(Ok(request), Err)
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
        match request.problem() {
            None => Ok(request),
            Some(problem) => Err(Problem::Unsupported(problem.to_string()).at("")),
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
    fn a_request_bears_its_adapter() {
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
    fn what_makes_an_engine_deaf_is_not_read() {
        for wrong in
            [lora(0), lora(LoraRequest::MAX_ID + 1), LoraRequest { path: String::new(), ..lora(1) }]
        {
            assert!(
                wrong.problem().is_some() && LoraRequest::from_value(&wrong.to_value()).is_err(),
                "{wrong:?}"
            );
            let add = EngineCoreRequest {
                lora_request: Some(Arc::new(wrong)),
                ..EngineCoreRequest::default()
            };
            let error = request::decode(&request::encode(&add)).unwrap_err().to_string();
            assert!(error.contains("lora_request"), "{error}");
        }
        assert!(LoraRequest::from_value(&Value::Nil).is_err());
    }
}
