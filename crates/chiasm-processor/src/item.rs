//! The output of a child for one item, validated.

use std::collections::HashSet;
use std::ops::Range;

use chiasm_types::{Dtype, TensorField};

use crate::memory::Memory;
use crate::message::{FieldKind, WireField, WireValue};
use crate::{ProcessorError, PromptUpdate};

/// The maximum number of fields of an item.
const MAX_FIELDS: usize = 1024;
/// The maximum number of dimensions of a tensor.
const MAX_DIMENSIONS: usize = 16;

/// The output of the processor for one item.
#[derive(Debug)]
pub struct ItemOutput {
    /// The fields, in the processor's order.
    pub fields: Vec<ItemField>,
    /// The updates that write the item in a prompt.
    pub updates: Vec<PromptUpdate>,
    memory: Memory,
    /// The bytes from the memory's beginning to the end of the last tensor.
    used_bytes: u64,
}

/// A named argument of the model for an item.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemField {
    /// The name, such as `pixel_values`.
    pub name: String,
    /// The way in which the engine joins the field with the same field of other items.
    pub field: TensorField,
    /// The value.
    pub value: ItemValue,
}

/// The value of a field.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemValue {
    /// A tensor in the item's memory.
    Tensor(ItemTensor),
    /// An integer.
    Int(i64),
    /// A finite floating-point number.
    Float(f64),
    /// A list of values.
    List(Vec<ItemValue>),
}

/// A tensor in an item's memory: dense, row-major and little-endian.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemTensor {
    /// The element type.
    pub dtype: Dtype,
    /// The extent of each dimension.
    pub shape: Vec<usize>,
    /// The byte range in the item's memory.
    range: Range<u64>,
}

impl ItemTensor {
    /// Returns the size in bytes.
    pub fn byte_len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }
}

/// The validated reply for an item, without the item's memory.
pub(crate) struct ItemDescription {
    fields: Vec<ItemField>,
    updates: Vec<PromptUpdate>,
    used_bytes: u64,
}

impl ItemDescription {
    /// Adds the item's memory.
    pub(crate) fn with_memory(self, memory: Memory) -> ItemOutput {
        let Self { fields, updates, used_bytes } = self;
        ItemOutput { fields, updates, memory, used_bytes }
    }

    /// Validates a child's reply for an item in `memory`.
    pub(crate) fn validate(
        memory: &Memory,
        fields: Vec<WireField>,
        updates: Vec<PromptUpdate>,
    ) -> Result<Self, ProcessorError> {
        let invalid = |reason: String| ProcessorError::InvalidReply(reason);
        if fields.is_empty() || fields.len() > MAX_FIELDS {
            return Err(invalid(format!("an item with {} fields", fields.len())));
        }
        let is_bad =
            |update: &PromptUpdate| update.token_counts().is_none_or(|(tokens, _)| tokens == 0);
        if updates.iter().any(is_bad) {
            return Err(invalid("an item with no tokens, or with too many".to_owned()));
        }
        let mut used_bytes = 0;
        let mut names = HashSet::new();
        let mut checked = Vec::with_capacity(fields.len());
        for field in fields {
            let value = validate_value(field.data, memory.length(), &mut used_bytes)
                .map_err(|error| invalid(format!("the field '{}' {error}", field.name)))?;
            let rows = match &value {
                ItemValue::Tensor(tensor) => {
                    let dim = if field.dim < 0 {
                        field.dim + tensor.shape.len() as i64
                    } else {
                        field.dim
                    };
                    usize::try_from(dim).ok().and_then(|dim| tensor.shape.get(dim)).copied()
                }
                ItemValue::List(list) => Some(list.len()),
                ItemValue::Int(_) | ItemValue::Float(_) => None,
            };
            let keep_on_cpu = field.keep_on_cpu;
            let join = match field.kind {
                FieldKind::Batched => TensorField::Batched { keep_on_cpu },
                FieldKind::Shared => TensorField::Shared { keep_on_cpu },
                FieldKind::Flat => {
                    let rows = rows.ok_or_else(|| {
                        invalid(format!("the field '{}' has no rows", field.name))
                    })?;
                    TensorField::Flat { rows, dim: field.dim, keep_on_cpu }
                }
            };
            if !names.insert(field.name.clone()) {
                return Err(invalid(format!("two fields '{}'", field.name)));
            }
            checked.push(ItemField { name: field.name, field: join, value });
        }
        Ok(Self { fields: checked, updates, used_bytes })
    }
}

impl ItemOutput {
    /// Returns the bytes of memory that the item's file and tensors take.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Copies a tensor of this item to `out`, whose length is [`ItemTensor::byte_len`].
    ///
    /// # Errors
    /// [`ProcessorError::InvalidReply`] if the child has truncated the memory.
    ///
    /// # Panics
    /// If `out` has another length than the tensor.
    pub fn read(&self, tensor: &ItemTensor, out: &mut [u8]) -> Result<(), ProcessorError> {
        assert_eq!(out.len(), tensor.byte_len(), "a tensor is copied as a whole");
        self.memory.read(out, tensor.range.start).map_err(|error| {
            ProcessorError::InvalidReply(format!("a tensor can't be read: {error}"))
        })
    }
}

/// The defect of a field's value. The texts complete "the field 'x' …".
#[derive(Debug, thiserror::Error)]
enum InvalidValue {
    #[error("has a type that engines do not accept")]
    Kind,
    #[error("has elements of type '{0}'")]
    ElementType(String),
    #[error("does not match its shape, or lies outside the item's memory")]
    Extent,
}

/// Validates a value. Its tensors must lie within `memory_bytes`; `used_bytes` is raised to the end
/// of each tensor.
fn validate_value(
    value: WireValue,
    memory_bytes: u64,
    used_bytes: &mut u64,
) -> Result<ItemValue, InvalidValue> {
    match value {
        WireValue::Int(value) => Ok(ItemValue::Int(value)),
        WireValue::Float(value) if value.is_finite() => Ok(ItemValue::Float(value)),
        WireValue::Float(_) | WireValue::Other(_) => Err(InvalidValue::Kind),
        WireValue::List(list) => list
            .into_iter()
            .map(|value| validate_value(value, memory_bytes, used_bytes))
            .collect::<Result<_, _>>()
            .map(ItemValue::List),
        WireValue::Tensor { dtype, shape, offset, length } => {
            let dtype = Dtype::from_torch_name(&dtype).ok_or(InvalidValue::ElementType(dtype))?;
            let bytes = shape
                .iter()
                .try_fold(dtype.size() as u64, |bytes, &extent| bytes.checked_mul(extent as u64));
            let end = offset.checked_add(length).filter(|&end| end <= memory_bytes);
            match end {
                Some(end) if bytes == Some(length) && shape.len() <= MAX_DIMENSIONS => {
                    *used_bytes = end.max(*used_bytes);
                    Ok(ItemValue::Tensor(ItemTensor { dtype, shape, range: offset..end }))
                }
                _ => Err(InvalidValue::Extent),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::memory::Spares;

    fn output(field: Value) -> Result<ItemOutput, ProcessorError> {
        let memory = Arc::<Spares>::default().allocate(&[[1, 2, 3, 4, 5, 6]], 64).unwrap();
        let updates = vec![
            serde_json::from_value(json!({"mode": "replace", "target": [5], "full": [[7, 3]]}))
                .unwrap(),
        ];
        let fields = serde_json::from_value(json!([field])).unwrap();
        Ok(ItemDescription::validate(&memory, fields, updates)?.with_memory(memory))
    }

    fn field(data: Value) -> Value {
        json!({"name": "x", "kind": "flat", "dim": -1, "keep_on_cpu": false, "data": data})
    }

    #[test]
    fn tensor_is_read_from_its_offset() {
        let item =
            output(field(json!({"dtype": "uint8", "shape": [1, 3], "offset": 2, "length": 3})))
                .unwrap();
        let ItemField { field, value: ItemValue::Tensor(tensor), .. } = &item.fields[0] else {
            panic!("a tensor")
        };
        assert_eq!(*field, TensorField::Flat { rows: 3, dim: -1, keep_on_cpu: false });
        let mut out = [0; 3];
        item.read(tensor, &mut out).unwrap();
        assert_eq!((out, item.used_bytes()), ([3, 4, 5], 5));
    }

    #[test]
    fn invalid_fields_are_refused() {
        let tensor = |dtype: &str, shape: Value, offset: u64, length: u64| {
            field(json!({"dtype": dtype, "shape": shape, "offset": offset, "length": length}))
        };
        for wire in [
            tensor("uint8", json!([3]), 62, 3),
            tensor("uint8", json!([3]), u64::MAX, 3),
            tensor("uint8", json!([4]), 0, 3),
            tensor("float32", json!([usize::MAX, usize::MAX]), 0, 0),
            tensor("complex64", json!([1]), 0, 8),
            tensor("uint8", json!([]), 0, 1),
            tensor("uint8", json!(vec![1; 20]), 0, 1),
            field(json!("text")),
            field(json!([[{"a": 1}]])),
            field(json!(null)),
            field(json!(3)),
        ] {
            assert!(matches!(output(wire.clone()), Err(ProcessorError::InvalidReply(_))), "{wire}");
        }
        let list = json!({"name": "x", "kind": "batched", "keep_on_cpu": true, "data": [1, 2.5]});
        let value = &output(list).unwrap().fields[0].value;
        assert_eq!(*value, ItemValue::List(vec![ItemValue::Int(1), ItemValue::Float(2.5)]));
    }

    #[test]
    fn truncated_memory_is_an_error() {
        let item =
            output(field(json!({"dtype": "uint8", "shape": [3], "offset": 60, "length": 3})))
                .unwrap();
        item.memory.truncate(61);
        let ItemValue::Tensor(tensor) = &item.fields[0].value else { panic!("a tensor") };
        assert!(matches!(item.read(tensor, &mut [0; 3]), Err(ProcessorError::InvalidReply(_))));
    }
}
