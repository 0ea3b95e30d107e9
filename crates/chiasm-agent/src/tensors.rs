//! Conversion of an item's tensors to and from messages.

use bytes::Bytes;
use chiasm_backend::{FieldValue, ItemField, Tensor, TensorBytes};
use chiasm_types::{Dtype, MmHash, TensorField};

use crate::CHUNK_BYTES;
use crate::proto::field_value::Value;
use crate::proto::tensor_field::Join;
use crate::proto::{self, TensorChunk};

/// The maximum number of values in an item's fields. Models have some ten fields with a few values
/// each.
const MAX_VALUES: usize = 4096;
/// The maximum length of a field's name, in bytes.
const MAX_NAME_BYTES: usize = 128;

/// Returns the messages in which an item's tensors are sent.
pub(crate) fn to_messages(
    hash: &MmHash,
    fields: &[ItemField],
) -> impl Iterator<Item = TensorChunk> + Send + use<> {
    let first = TensorChunk {
        mm_hash: Bytes::copy_from_slice(hash.as_bytes()),
        fields: describe(fields),
        bytes: Bytes::new(),
    };
    let chunks = tensor_bytes(fields).into_iter().flat_map(|tensor| {
        (0..tensor.len())
            .step_by(CHUNK_BYTES)
            .map(move |from| tensor.slice(from..tensor.len().min(from + CHUNK_BYTES)))
    });
    [first].into_iter().chain(chunks.map(|bytes| TensorChunk { bytes, ..TensorChunk::default() }))
}

/// Returns the announcement of an item's tensors.
pub(crate) fn describe(fields: &[ItemField]) -> Vec<proto::TensorField> {
    fields.iter().map(field_to_message).collect()
}

/// Returns the bytes of an item's tensors, in the order in which they are sent.
pub(crate) fn tensor_bytes(fields: &[ItemField]) -> Vec<Bytes> {
    let mut tensors = Vec::new();
    fields.iter().for_each(|field| collect_tensors(&field.value, &mut tensors));
    tensors
}

/// Returns the total size of an item's tensors, in bytes.
pub(crate) fn total_bytes(fields: &[ItemField]) -> u64 {
    fn value_bytes(value: &FieldValue) -> u64 {
        match value {
            FieldValue::Int(_) | FieldValue::Float(_) => 0,
            FieldValue::List(list) => list.iter().map(value_bytes).sum(),
            FieldValue::Tensor(tensor) => tensor.bytes.as_ref().len() as u64,
        }
    }
    fields.iter().map(|field| value_bytes(&field.value)).sum()
}

fn collect_tensors(value: &FieldValue, tensors: &mut Vec<Bytes>) {
    match value {
        FieldValue::Int(_) | FieldValue::Float(_) => {}
        FieldValue::List(list) => list.iter().for_each(|value| collect_tensors(value, tensors)),
        FieldValue::Tensor(tensor) => tensors.push(match &tensor.bytes {
            TensorBytes::Here(bytes) => bytes.clone(),
            TensorBytes::Slot(slot) => Bytes::copy_from_slice(slot),
        }),
    }
}

fn field_to_message(ItemField { name, field, value }: &ItemField) -> proto::TensorField {
    let (join, keep_on_cpu) = match *field {
        TensorField::Flat { rows, dim, keep_on_cpu } => {
            (Join::Flat(proto::FlatJoin { rows: rows as u64, dim }), keep_on_cpu)
        }
        TensorField::Batched { keep_on_cpu } => (Join::Batched(true), keep_on_cpu),
        TensorField::Shared { keep_on_cpu } => (Join::Shared(true), keep_on_cpu),
    };
    proto::TensorField {
        name: name.to_string(),
        join: Some(join),
        keep_on_cpu,
        value: Some(value_to_message(value)),
    }
}

fn value_to_message(value: &FieldValue) -> proto::FieldValue {
    let value = match value {
        FieldValue::Int(whole) => Value::Whole(*whole),
        FieldValue::Float(number) => Value::Number(*number),
        FieldValue::List(list) => {
            Value::List(proto::FieldValues { values: list.iter().map(value_to_message).collect() })
        }
        FieldValue::Tensor(Tensor { dtype, shape, .. }) => Value::Tensor(proto::Tensor {
            dtype: dtype.torch_name().to_owned(),
            shape: shape.iter().map(|&extent| extent as u64).collect(),
        }),
    };
    proto::FieldValue { value: Some(value) }
}

/// The announcement of an item's tensors, whose bytes have not arrived yet.
#[derive(Debug)]
pub(crate) struct AnnouncedTensors {
    fields: Vec<ItemField>,
    /// The total size of all tensors.
    pub(crate) bytes: u64,
}

impl AnnouncedTensors {
    /// Parses the fields of a first message; `None` if they are malformed.
    pub(crate) fn from_message(fields: Vec<proto::TensorField>) -> Option<Self> {
        let mut bytes = 0;
        let mut left = MAX_VALUES;
        let fields =
            fields.into_iter().map(|field| field_from_message(field, &mut bytes, &mut left));
        Some(Self { fields: fields.collect::<Option<_>>()?, bytes })
    }

    /// Returns the fields with their bytes. `bytes` are those of all tensors in order, as many as
    /// announced.
    pub(crate) fn into_fields(mut self, mut bytes: Bytes) -> Vec<ItemField> {
        self.fields.iter_mut().for_each(|field| fill(&mut field.value, &mut bytes));
        self.fields
    }
}

fn fill(value: &mut FieldValue, rest: &mut Bytes) {
    match value {
        FieldValue::Int(_) | FieldValue::Float(_) => {}
        FieldValue::List(list) => list.iter_mut().for_each(|value| fill(value, rest)),
        FieldValue::Tensor(tensor) => {
            let bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.size();
            tensor.bytes = TensorBytes::Here(rest.split_to(bytes.min(rest.len())));
        }
    }
}

fn field_from_message(
    field: proto::TensorField,
    bytes: &mut u64,
    left: &mut usize,
) -> Option<ItemField> {
    let proto::TensorField { name, join, keep_on_cpu, value } = field;
    let is_name = |name: &str| {
        (1..=MAX_NAME_BYTES).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let field = match join? {
        Join::Flat(proto::FlatJoin { rows, dim }) => {
            TensorField::Flat { rows: rows.try_into().ok()?, dim, keep_on_cpu }
        }
        Join::Batched(_) => TensorField::Batched { keep_on_cpu },
        Join::Shared(_) => TensorField::Shared { keep_on_cpu },
    };
    let value = value_from_message(value?, bytes, left)?;
    is_name(&name).then_some(ItemField { name: name.into(), field, value })
}

fn value_from_message(
    value: proto::FieldValue,
    bytes: &mut u64,
    left: &mut usize,
) -> Option<FieldValue> {
    *left = left.checked_sub(1)?;
    Some(match value.value? {
        Value::Whole(whole) => FieldValue::Int(whole),
        Value::Number(number) => FieldValue::Float(number),
        Value::List(proto::FieldValues { values }) => {
            let values = values.into_iter().map(|value| value_from_message(value, bytes, left));
            FieldValue::List(values.collect::<Option<_>>()?)
        }
        Value::Tensor(proto::Tensor { dtype, shape }) => {
            let dtype = Dtype::from_torch_name(&dtype)?;
            let elements =
                shape.iter().try_fold(1_u64, |product, &extent| product.checked_mul(extent))?;
            *bytes = elements.checked_mul(dtype.size() as u64)?.checked_add(*bytes)?;
            let shape =
                shape.into_iter().map(|extent| extent.try_into().ok()).collect::<Option<_>>()?;
            FieldValue::Tensor(Tensor { dtype, shape, bytes: TensorBytes::Here(Bytes::new()) })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> FieldValue {
        let bytes = TensorBytes::Here(Bytes::copy_from_slice(bytes));
        FieldValue::Tensor(Tensor { dtype, shape: shape.to_vec(), bytes })
    }

    fn fields() -> Vec<ItemField> {
        let field =
            |name: &'static str, field, value| ItemField { name: name.into(), field, value };
        let pixels: Vec<u8> = (0..3 * CHUNK_BYTES / 2).map(|byte| byte as u8).collect();
        let rows = TensorField::Flat { rows: 3, dim: -1, keep_on_cpu: true };
        let list =
            vec![tensor(Dtype::U8, &[2], &[7, 8]), FieldValue::Int(-4), FieldValue::Float(0.5)];
        vec![
            field("pixel_values", rows, tensor(Dtype::BF16, &[3, CHUNK_BYTES / 4], &pixels)),
            field("of_many", TensorField::Batched { keep_on_cpu: false }, FieldValue::List(list)),
            field(
                "nothing",
                TensorField::Shared { keep_on_cpu: true },
                tensor(Dtype::I64, &[0, 4], &[]),
            ),
        ]
    }

    #[test]
    fn tensors_survive_the_wire() {
        let sent = fields();
        let mut messages = to_messages(&MmHash::new([9; 32]), &sent);
        let first = messages.next().unwrap();
        assert_eq!(*first.mm_hash, [9; 32]);
        let announced = AnnouncedTensors::from_message(first.fields).unwrap();
        let bytes: Vec<u8> = messages
            .flat_map(|message| {
                assert!(message.bytes.len() <= CHUNK_BYTES);
                message.bytes.to_vec()
            })
            .collect();
        assert_eq!(announced.bytes, bytes.len() as u64);
        let received = announced.into_fields(bytes.into());
        assert_eq!(format!("{received:?}"), format!("{sent:?}"));
    }

    #[test]
    fn malformed_announcements_are_refused() {
        let first = to_messages(&MmHash::new([9; 32]), &fields()).next().unwrap();
        let is_accepted = |change: &dyn Fn(&mut proto::TensorField)| {
            let mut fields = first.fields.clone();
            change(&mut fields[0]);
            AnnouncedTensors::from_message(fields).is_some()
        };
        let value = |dtype: &str, shape: &[u64]| {
            let tensor = proto::Tensor { dtype: dtype.to_owned(), shape: shape.to_vec() };
            Some(proto::FieldValue { value: Some(Value::Tensor(tensor)) })
        };
        assert!(is_accepted(&|_| {}));
        assert!(is_accepted(&|field| field.value = value("float32", &[2, 2])));
        assert!(!is_accepted(&|field| field.value = value("float3", &[2, 2])));
        assert!(!is_accepted(&|field| field.value = value("float32", &[u64::MAX, 2])));
        assert!(!is_accepted(&|field| field.value = value("float32", &[u64::MAX / 2])));
        assert!(!is_accepted(&|field| field.value = None));
        assert!(!is_accepted(&|field| field.join = None));
        assert!(!is_accepted(&|field| field.name.clear()));
        assert!(!is_accepted(&|field| field.name = "a b".to_owned()));
        assert!(!is_accepted(&|field| field.name = "a".repeat(129)));
        let many = proto::FieldValues { values: vec![value("uint8", &[]).unwrap(); MAX_VALUES] };
        let many = proto::FieldValue { value: Some(Value::List(many)) };
        assert!(!is_accepted(&|field| field.value = Some(many.clone())));
    }
}
