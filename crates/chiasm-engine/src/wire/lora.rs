//! A request's LoRA adapter.

use rmpv::Value;

use super::codec::{Fields, Wire};
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::writer::Writer;

/// `LoRARequest` in `vllm/lora/request.py`: an array that leaves out what has its default behind the last that has not.
///
/// An engine that can't decode one goes deaf, so the id has to be at least 1 and the path must not be empty. Its runners keep the id in
/// 32 bits with a sign.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoraRequest {
    /// What blocks are kept apart by. Adapters of one batch that share it are one to the engine, and it dies.
    pub name: String,
    /// What the engine finds a loaded adapter by: one that is loaded is not looked at again.
    pub id: u32,
    /// The folder of the adapter. One that is relative and not there is taken for the id of a model on the hub.
    pub path: String,
    /// See [`chiasm_backend::Adapter::is_3d`].
    pub is_3d: bool,
}

impl LoraRequest {
    /// The largest id.
    pub const MAX_ID: u32 = i32::MAX as u32;

    /// What the engine would go deaf of.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        match self {
            Self { id, .. } if !(1..=Self::MAX_ID).contains(id) => Some("its id must be from 1 to 2147483647"),
            Self { name, path, .. } if name.is_empty() || path.is_empty() => Some("its name and path must not be empty"),
            _ => None,
        }
    }

    /// The same as an argument of a method.
    pub fn to_value(&self) -> Value {
        let mut fields = vec![Value::from(self.name.as_str()), Value::from(self.id), Value::from(self.path.as_str())];
        if self.is_3d {
            fields.extend([Value::Nil, Value::from(false), Value::from(true)]);
        }
        Value::Array(fields)
    }

    /// The engine's side of [`Self::to_value`].
    ///
    /// # Errors
    /// What msgspec would refuse, or what follows from it.
    pub fn from_value(value: &Value) -> Result<Self, String> {
        let fields = value.as_array().ok_or("Expected `array`")?;
        let text = |index: usize| fields.get(index).and_then(Value::as_str).unwrap_or_default().to_owned();
        let id = fields.get(1).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
        let is_3d = fields.get(5).and_then(Value::as_bool).unwrap_or(false);
        let request = Self { name: text(0), id, path: text(2), is_3d };
        request.problem().map_or(Ok(request), |problem| Err(problem.to_owned()))
    }
}

impl Wire for LoraRequest {
    fn write(&self, to: &mut Writer) {
        to.array(if self.is_3d { 6 } else { 3 });
        self.name.write(to);
        self.id.write(to);
        self.path.write(to);
        if self.is_3d {
            to.nil(); // base_model_name
            to.bool(false); // load_inplace
            to.bool(true);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut fields = Fields::open(from, 2)?;
        let name = fields.next(from).named("lora_name")?;
        let id = fields.next(from).named("lora_int_id")?;
        let path = fields.next(from).named("lora_path")?;
        fields.skip(from)?; // base_model_name
        fields.skip(from)?; // load_inplace
        let is_3d = fields.next(from).named("is_3d_lora_weight")?;
        fields.close(from)?;
        let request = Self { name, id, path, is_3d };
        match request.problem() {
            None => Ok(request),
            Some(problem) => Err(Problem::Unsupported(problem.to_owned()).at("")),
        }
    }
}
