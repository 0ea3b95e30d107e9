//! Media items of a request: their tensors and their positions in the prompt.

use bytes::Bytes;
use chiasm_types::{Dtype, Placeholder};
use rmp::Marker;

use super::codec::{Fields, Wire, wire_map};
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::tensor::WireTensor;
use super::writer::Writer;

/// One media item of a request (`MultiModalFeatureSpec` in `vllm/multimodal/inputs.py`).
#[derive(Clone, Debug, PartialEq)]
pub struct MmFeature {
    /// The item's tensors; `None` if the engine's receiver cache holds them.
    pub data: Option<MmItem>,
    /// The modality, e.g. `image`.
    pub modality: String,
    /// The key of the engine's encoder cache, which is also part of the engine's block hashes.
    pub identifier: String,
    /// The prompt tokens that stand for the item.
    pub position: Placeholder,
    /// The key of the engine's receiver cache; `None` for `identifier`.
    pub mm_hash: Option<String>,
}

/// The tensors of one media item, by name and in order (`MultiModalKwargsItem`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MmItem(pub Vec<(String, MmField)>);

/// The value of one field, and the rule by which vLLM batches it with those of other items
/// (`MultiModalFieldElem`).
#[derive(Clone, Debug, PartialEq)]
pub struct MmField {
    /// The value.
    pub data: Option<MmData>,
    /// The rule for joining the values of several items.
    pub kind: FieldKind,
}

/// `NestedTensors` of `vllm/multimodal/inputs.py`.
#[derive(Clone, Debug, PartialEq)]
pub enum MmData {
    /// A tensor.
    Tensor(WireTensor),
    /// A plain integer.
    Int(i64),
    /// A plain float.
    Float(f64),
    /// A list of values.
    List(Vec<MmData>),
}

/// The rule by which the engine joins a field's values of several items (`MultiModalFieldConfig`
/// in `vllm/multimodal/inputs.py`).
#[derive(Clone, Debug, PartialEq)]
pub enum FieldKind {
    /// Concatenated along `dim`.
    Flat {
        /// `[start, stop, step]` of each item; for one item `[0, rows, None]`.
        slices: Vec<[Option<i64>; 3]>,
        /// The dimension.
        dim: i64,
        /// `true` if the tensor is not moved to the device.
        keep_on_cpu: bool,
    },
    /// Stacked.
    Batched {
        /// `true` if the tensor is not moved to the device.
        keep_on_cpu: bool,
    },
    /// One value, shared by all items.
    Shared {
        /// The number of items.
        batch_size: usize,
        /// `true` if the tensor is not moved to the device.
        keep_on_cpu: bool,
    },
}

impl MmField {
    /// Creates a field whose tensors are concatenated along their first dimension, which has
    /// `rows` rows here.
    pub fn flat(tensor: WireTensor, rows: usize) -> Self {
        let kind = FieldKind::Flat {
            slices: vec![[Some(0), Some(rows as i64), None]],
            dim: 0,
            keep_on_cpu: false,
        };
        Self { data: Some(MmData::Tensor(tensor)), kind }
    }

    /// Creates a field whose tensors are stacked along a new first dimension.
    pub fn batched(tensor: WireTensor, keep_on_cpu: bool) -> Self {
        Self { data: Some(MmData::Tensor(tensor)), kind: FieldKind::Batched { keep_on_cpu } }
    }

    /// Creates a field whose tensor is the same for all items: the engine uses the first item's.
    pub fn shared(tensor: WireTensor, keep_on_cpu: bool) -> Self {
        Self {
            data: Some(MmData::Tensor(tensor)),
            kind: FieldKind::Shared { batch_size: 1, keep_on_cpu },
        }
    }

    /// Returns the tensor if the value is a single tensor.
    pub fn tensor(&self) -> Option<&WireTensor> {
        match &self.data {
            Some(MmData::Tensor(tensor)) => Some(tensor),
            _ => None,
        }
    }
}

impl MmItem {
    /// Encodes the item alone as msgpack and aux frames, as vLLM's `MsgpackEncoder` encodes a
    /// `MultiModalKwargsItem`.
    pub fn encode(&self) -> Vec<Bytes> {
        let mut to = Writer::default();
        self.write(&mut to);
        to.into_frames()
    }

    /// Returns the field with this name.
    pub fn get(&self, name: &str) -> Option<&MmField> {
        self.0.iter().find(|(field, _)| field == name).map(|(_, field)| field)
    }
}

impl MmFeature {
    /// Returns the key of the engine's receiver cache: `mm_hash`, or else `identifier`.
    pub fn cache_key(&self) -> &str {
        self.mm_hash.as_deref().unwrap_or(&self.identifier)
    }
}

/// The map of an [`MmFeature`], for reading. Its fields are in the order in which they are written.
#[derive(Default)]
struct FeatureMap {
    data: Option<MmItem>,
    modality: String,
    identifier: String,
    mm_position: PositionMap,
    mm_hash: Option<String>,
}

wire_map!(FeatureMap {
    data = "data",
    modality = "modality",
    identifier = "identifier",
    mm_position = "mm_position",
    mm_hash = "mm_hash",
});

/// `PlaceholderRange` of `vllm/multimodal/inputs.py`.
#[derive(Default)]
struct PositionMap {
    offset: usize,
    length: usize,
    is_embed: Option<WireTensor>,
}

wire_map!(PositionMap { offset = "offset", length = "length", is_embed = "is_embed" });

impl Wire for MmFeature {
    fn write(&self, to: &mut Writer) {
        to.map(5);
        to.str("data");
        self.data.write(to);
        to.str("modality");
        self.modality.write(to);
        to.str("identifier");
        self.identifier.write(to);
        to.str("mm_position");
        let is_embed = self.position.is_embed.as_ref().map(|mask| {
            let bytes: Bytes = mask.iter().map(|&embed| u8::from(embed)).collect();
            WireTensor {
                dtype: Dtype::Bool.torch_name().into(),
                shape: vec![mask.len()],
                data: super::TensorData::Bytes(bytes),
            }
        });
        PositionMap { offset: self.position.offset, length: self.position.length, is_embed }
            .write(to);
        to.str("mm_hash");
        self.mm_hash.write(to);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let FeatureMap { data, modality, identifier, mm_position, mm_hash } =
            FeatureMap::read(from)?;
        let is_embed = match mm_position.is_embed {
            None => None,
            Some(mask) => {
                let unsupported = || Problem::Unsupported(mask.dtype.to_string()).at("is_embed");
                let bytes =
                    mask.bytes().filter(|_| mask.dtype == "bool").ok_or_else(unsupported)?;
                Some(bytes.iter().map(|&byte| byte != 0).collect())
            }
        };
        let position =
            Placeholder { offset: mm_position.offset, length: mm_position.length, is_embed };
        Ok(Self { data, modality, identifier, position, mm_hash })
    }
}

impl Wire for MmItem {
    fn write(&self, to: &mut Writer) {
        self.0.write(to);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        Vec::read(from).map(Self)
    }
}

impl Wire for MmField {
    fn write(&self, to: &mut Writer) {
        to.map(2);
        to.str("data");
        self.data.write(to);
        to.str("field");
        self.kind.write(to);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut data = None;
        let mut kind = None;
        for _ in 0..from.map()? {
            match from.str()? {
                "data" => {
                    data = if from.take_nil()? { None } else { Some(read_data(from, MAX_NESTING)?) }
                }
                "field" => kind = Some(FieldKind::read(from).named("field")?),
                _ => from.skip()?,
            }
        }
        Ok(Self { data, kind: kind.ok_or(Problem::Missing.at("field"))? })
    }
}

/// The maximum nesting of [`MmData`]. vLLM has lists of lists of tensors; deeper ones have not been
/// seen.
const MAX_NESTING: usize = 8;

impl Wire for MmData {
    fn write(&self, to: &mut Writer) {
        match self {
            Self::Tensor(tensor) => tensor.write(to),
            Self::Int(value) => to.int(*value),
            Self::Float(value) => to.float(*value),
            Self::List(list) => list.write(to),
        }
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        read_data(from, MAX_NESTING)
    }
}

fn read_data(from: &mut Reader<'_>, nesting: usize) -> Result<MmData, WireError> {
    if nesting == 0 {
        return Err(Problem::TooDeep.at("data"));
    }
    match from.peek()? {
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
            if from.peek_is_tensor()? {
                WireTensor::read(from).map(MmData::Tensor)
            } else {
                from.list(|from| read_data(from, nesting - 1)).map(MmData::List)
            }
        }
        Marker::F32 | Marker::F64 => from.float().map(MmData::Float),
        _ => i64::read(from).map(MmData::Int),
    }
}

impl Wire for FieldKind {
    fn write(&self, to: &mut Writer) {
        to.array(2);
        match self {
            Self::Flat { slices, dim, keep_on_cpu } => {
                to.str("flat");
                to.map(3);
                to.str("keep_on_cpu");
                keep_on_cpu.write(to);
                to.str("slices");
                to.array(slices.len());
                for slice in slices {
                    to.array(3);
                    slice.iter().for_each(|bound| bound.write(to));
                }
                to.str("dim");
                dim.write(to);
            }
            Self::Batched { keep_on_cpu } => {
                to.str("batched");
                to.map(1);
                to.str("keep_on_cpu");
                keep_on_cpu.write(to);
            }
            Self::Shared { batch_size, keep_on_cpu } => {
                to.str("shared");
                to.map(2);
                to.str("keep_on_cpu");
                keep_on_cpu.write(to);
                to.str("batch_size");
                batch_size.write(to);
            }
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let fields = Fields::open(from, 2)?;
        let kind = from.str()?;
        let FieldMap { keep_on_cpu, slices, dim, batch_size } = FieldMap::read(from)?;
        fields.close_after(2, from)?;
        match kind {
            "flat" => Ok(Self::Flat {
                slices: slices.into_iter().map(|Slice(bounds)| bounds).collect(),
                dim,
                keep_on_cpu,
            }),
            "batched" => Ok(Self::Batched { keep_on_cpu }),
            "shared" => Ok(Self::Shared { batch_size, keep_on_cpu }),
            other => Err(Problem::Unsupported(other.to_owned()).at("field")),
        }
    }
}

/// The arguments of all kinds of fields.
#[derive(Default)]
struct FieldMap {
    keep_on_cpu: bool,
    slices: Vec<Slice>,
    dim: i64,
    batch_size: usize,
}

wire_map!(FieldMap {
    keep_on_cpu = "keep_on_cpu",
    slices = "slices",
    dim = "dim",
    batch_size = "batch_size",
});

/// The index of an item in a tensor: a Python `slice`.
struct Slice([Option<i64>; 3]);

impl Wire for Slice {
    fn write(&self, to: &mut Writer) {
        to.array(3);
        self.0.iter().for_each(|bound| bound.write(to));
    }

    /// Reads a slice, or a tuple of one slice for each dimension up to the field's, of which only
    /// the last one selects (`flat_from_sizes` in `vllm/multimodal/inputs.py`).
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        if !from.peek_is_nested()? {
            return read_bounds(from).map(Self);
        }
        let last = from.list(read_bounds)?.pop();
        last.map(Self).ok_or_else(|| Problem::TooShort { expected: 1, found: 0 }.at(""))
    }
}

fn read_bounds(from: &mut Reader<'_>) -> Result<[Option<i64>; 3], WireError> {
    let fields = Fields::open(from, 3)?;
    let bounds = [Option::read(from)?, Option::read(from)?, Option::read(from)?];
    fields.close_after(3, from)?;
    Ok(bounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the kind of a flat field with `dim` whose only index is `index`.
    fn read_flat(index: &[u8], dim: u8) -> Result<FieldKind, WireError> {
        let head = b"\x92\xa4flat\x83\xabkeep_on_cpu\xc2\xa6slices\x91";
        let frame = [&head[..], index, b"\xa3dim", &[dim]].concat();
        FieldKind::read(&mut Reader::new(&[frame.into()])?)
    }

    #[test]
    fn index_is_a_slice_or_a_tuple_of_slices() {
        let flat = |dim| FieldKind::Flat {
            slices: vec![[Some(0), Some(24), None]],
            dim,
            keep_on_cpu: false,
        };
        assert_eq!(read_flat(b"\x93\x00\x18\xc0", 0).unwrap(), flat(0));
        assert_eq!(read_flat(b"\x91\x93\x00\x18\xc0", 0).unwrap(), flat(0));
        let all_then_slice = b"\x92\x93\xc0\xc0\xc0\x93\x00\x18\xc0";
        assert_eq!(read_flat(all_then_slice, 1).unwrap(), flat(1));
        read_flat(b"\x91\x91\x93\x00\x18\xc0", 0).unwrap_err();
        read_flat(b"\x90", 0).unwrap_err();
    }
}
