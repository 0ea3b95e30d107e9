//! What a child says that it made of an item's file, checked.

use std::collections::HashSet;
use std::ops::Range;

use chiasm_types::{Dtype, TensorField};

use crate::memory::Memory;
use crate::message::{FieldKind, SaidField, SaidValue};
use crate::{ProcessorError, PromptUpdate};

/// More than any item has.
const MOST_FIELDS: usize = 1024;
/// Dimensions of a tensor.
const MOST_DIMENSIONS: usize = 16;

/// What a processor made of a file.
#[derive(Debug)]
pub struct MadeItem {
    /// Its fields, in the processor's order.
    pub fields: Vec<ItemField>,
    /// The ways to write it in a prompt.
    pub updates: Vec<PromptUpdate>,
    memory: Memory,
    /// Bytes from the memory's beginning to the end of the last tensor.
    used: u64,
}

/// One named argument of the model for an item.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemField {
    /// Its name, such as `pixel_values`.
    pub name: String,
    /// How the engine joins it with the same field of other items.
    pub field: TensorField,
    /// What it is.
    pub value: ItemValue,
}

/// The value of a field.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemValue {
    /// A tensor in the item's memory.
    Tensor(ItemTensor),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// Several values.
    List(Vec<ItemValue>),
}

/// A tensor in an item's memory. Its elements lie densely, last dimension fastest, little-endian.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemTensor {
    /// Element type.
    pub dtype: Dtype,
    /// Extents.
    pub shape: Vec<usize>,
    place: Range<u64>,
}

impl ItemTensor {
    /// Its bytes, all of them.
    pub fn bytes(&self) -> usize {
        (self.place.end - self.place.start) as usize
    }
}

/// What a child says that it made in an item's memory, checked.
pub(crate) struct ItemParts {
    fields: Vec<ItemField>,
    updates: Vec<PromptUpdate>,
    used: u64,
}

impl ItemParts {
    /// The item with its memory.
    pub(crate) fn with(self, memory: Memory) -> MadeItem {
        let Self { fields, updates, used } = self;
        MadeItem { fields, updates, memory, used }
    }

    /// Checks what a child says.
    pub(crate) fn new(
        memory: &Memory,
        fields: Vec<SaidField>,
        updates: Vec<PromptUpdate>,
    ) -> Result<Self, ProcessorError> {
        let nonsense = |what: String| ProcessorError::Nonsense(what);
        if fields.is_empty() || fields.len() > MOST_FIELDS {
            return Err(nonsense(format!("an item with {} fields", fields.len())));
        }
        if updates.iter().any(|update| update.tokens().is_none_or(|(tokens, _)| tokens == 0)) {
            return Err(nonsense("an item that is written with no tokens, or too many".to_owned()));
        }
        let mut used = 0;
        let mut names = HashSet::new();
        let mut checked = Vec::with_capacity(fields.len());
        for field in fields {
            let value = value(field.data, memory.length(), &mut used)
                .map_err(|error| nonsense(format!("the field '{}' {error}", field.name)))?;
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
            let joined = match field.kind {
                FieldKind::Batched => TensorField::Batched { keep_on_cpu },
                FieldKind::Shared => TensorField::Shared { keep_on_cpu },
                FieldKind::Flat => {
                    let rows = rows.ok_or_else(|| {
                        nonsense(format!("the field '{}' has no rows", field.name))
                    })?;
                    TensorField::Flat { rows, dim: field.dim, keep_on_cpu }
                }
            };
            if !names.insert(field.name.clone()) {
                return Err(nonsense(format!("two fields '{}'", field.name)));
            }
            checked.push(ItemField { name: field.name, field: joined, value });
        }
        Ok(Self { fields: checked, updates, used })
    }
}

impl MadeItem {
    /// Bytes of memory that this takes.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Copies a tensor of this item's to `out`, which has its number of bytes.
    ///
    /// # Errors
    /// [`ProcessorError::Nonsense`] if it is not there: the child has cut off the memory.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn read(&self, tensor: &ItemTensor, out: &mut [u8]) -> Result<(), ProcessorError> {
        assert_eq!(out.len(), tensor.bytes(), "a tensor is copied as a whole");
        let read = self.memory.read(out, tensor.place.start);
        read.map_err(|error| ProcessorError::Nonsense(format!("a tensor can't be read: {error}")))
    }
}

/// The fault of a field's value. The texts complete "the field 'x' …".
#[derive(Debug, thiserror::Error)]
enum BadValue {
    #[error("is of a kind that engines do not take")]
    Kind,
    #[error("has elements of type '{0}'")]
    ElementType(String),
    #[error("does not fit its shape, or the memory")]
    Extent,
}

/// A value whose tensors lie within `memory` bytes. `used` rises to the end of each.
fn value(said: SaidValue, memory: u64, used: &mut u64) -> Result<ItemValue, BadValue> {
    match said {
        SaidValue::Int(value) => Ok(ItemValue::Int(value)),
        SaidValue::Float(value) if value.is_finite() => Ok(ItemValue::Float(value)),
        SaidValue::Float(_) | SaidValue::Other(_) => Err(BadValue::Kind),
        SaidValue::List(list) => list
            .into_iter()
            .map(|said| value(said, memory, used))
            .collect::<Result<_, _>>()
            .map(ItemValue::List),
        SaidValue::Tensor { dtype, shape, offset, length } => {
            let dtype = Dtype::from_torch_name(&dtype).ok_or(BadValue::ElementType(dtype))?;
            let bytes = shape
                .iter()
                .try_fold(dtype.size() as u64, |bytes, &extent| bytes.checked_mul(extent as u64));
            let end = offset.checked_add(length).filter(|&end| end <= memory);
            match end {
                Some(end) if bytes == Some(length) && shape.len() <= MOST_DIMENSIONS => {
                    *used = end.max(*used);
                    Ok(ItemValue::Tensor(ItemTensor { dtype, shape, place: offset..end }))
                }
                _ => Err(BadValue::Extent),
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

    fn made(field: Value) -> Result<MadeItem, ProcessorError> {
        let memory = Arc::<Spares>::default().memory(&[1, 2, 3, 4, 5, 6], 64).unwrap();
        let updates = vec![
            serde_json::from_value(json!({"mode": "replace", "target": [5], "full": [[7, 3]]}))
                .unwrap(),
        ];
        let parts =
            ItemParts::new(&memory, serde_json::from_value(json!([field])).unwrap(), updates)?;
        Ok(parts.with(memory))
    }

    fn field(data: Value) -> Value {
        json!({"name": "x", "kind": "flat", "dim": -1, "keep_on_cpu": false, "data": data})
    }

    #[test]
    fn a_tensor_is_read_from_where_it_lies() {
        let item =
            made(field(json!({"dtype": "uint8", "shape": [1, 3], "offset": 2, "length": 3})))
                .unwrap();
        let ItemField { field, value: ItemValue::Tensor(tensor), .. } = &item.fields[0] else {
            panic!("a tensor")
        };
        assert_eq!(*field, TensorField::Flat { rows: 3, dim: -1, keep_on_cpu: false });
        let mut out = [0; 3];
        item.read(tensor, &mut out).unwrap();
        assert_eq!((out, item.used()), ([3, 4, 5], 5));
    }

    #[test]
    fn what_a_child_says_is_looked_at() {
        let tensor = |dtype: &str, shape: Value, offset: u64, length: u64| {
            field(json!({"dtype": dtype, "shape": shape, "offset": offset, "length": length}))
        };
        for said in [
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
            assert!(matches!(made(said.clone()), Err(ProcessorError::Nonsense(_))), "{said}");
        }
        let list = json!({"name": "x", "kind": "batched", "keep_on_cpu": true, "data": [1, 2.5]});
        let value = &made(list).unwrap().fields[0].value;
        assert_eq!(*value, ItemValue::List(vec![ItemValue::Int(1), ItemValue::Float(2.5)]));
    }

    #[test]
    fn memory_that_was_cut_off_is_noticed() {
        let item = made(field(json!({"dtype": "uint8", "shape": [3], "offset": 60, "length": 3})))
            .unwrap();
        item.memory.cut_off(61);
        let ItemValue::Tensor(tensor) = &item.fields[0].value else { panic!("a tensor") };
        assert!(matches!(item.read(tensor, &mut [0; 3]), Err(ProcessorError::Nonsense(_))));
    }
}
