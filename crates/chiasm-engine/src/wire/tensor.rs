//! Arrays inside messages: `[dtype, shape, data]`.

use std::borrow::Cow;

use bytes::Bytes;
use chiasm_transfer::Slot;
use chiasm_types::Dtype;
use rmp::Marker;
use rmpv::Value;

use super::codec::Wire;
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::version;
use super::writer::Writer;

/// A `torch.Tensor` or `numpy.ndarray` (`MsgpackEncoder._encode_tensor`, `_encode_ndarray` in
/// `vllm/v1/serial_utils.py`).
///
/// Row-major, little-endian. Cloning shares the bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct WireTensor {
    /// Element type: a torch name (`uint8`, `bfloat16`) or, from numpy, an array-interface string
    /// (`<i4`).
    pub dtype: Cow<'static, str>,
    /// Elements per dimension; empty for a scalar.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: TensorData,
}

/// The bytes of a tensor, or the place where the engine finds them.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// Bytes that travel in the message: inline below 256, as an aux frame without a copy from
    /// there on.
    Bytes(Bytes),
    /// A slot of shared memory. A client that sends it to the slot's engine lends it, which makes
    /// it [out of band](Self::OutOfBand); encoded as it is, it becomes bytes of the message.
    Slot(Slot),
    /// A map from which a plugin in the engine finds the bytes elsewhere (vLLM's
    /// `OOBTensorProvider`).
    OutOfBand(Value),
}

impl WireTensor {
    /// A tensor of a type that Chiasm hands over. `None` when `data` is not `shape` elements of
    /// `dtype`.
    pub fn new(dtype: Dtype, shape: Vec<usize>, data: Bytes) -> Option<Self> {
        Self::of(dtype, shape, data.len(), TensorData::Bytes(data))
    }

    /// A tensor that was written into shared memory. `None` when the slot is not `shape` elements
    /// of `dtype`.
    pub fn in_slot(dtype: Dtype, shape: Vec<usize>, slot: Slot) -> Option<Self> {
        Self::of(dtype, shape, slot.len(), TensorData::Slot(slot))
    }

    fn of(dtype: Dtype, shape: Vec<usize>, bytes: usize, data: TensorData) -> Option<Self> {
        let fits = bytes_of(&shape, dtype.size()) == Some(bytes);
        fits.then(|| Self { dtype: Cow::Borrowed(dtype.torch_name()), shape, data })
    }

    /// Number of elements; `None` when it exceeds `usize`.
    pub fn elements(&self) -> Option<usize> {
        bytes_of(&self.shape, 1)
    }

    /// Number of bytes that the shape needs; `None` for an unknown dtype.
    pub fn nbytes(&self) -> Option<usize> {
        bytes_of(&self.shape, element_size(&self.dtype)?)
    }

    /// The bytes, unless they are out of band.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.data {
            TensorData::Bytes(bytes) => Some(bytes),
            TensorData::Slot(slot) => Some(slot),
            TensorData::OutOfBand(_) => None,
        }
    }

    /// The elements as integers; `None` when they are out of band or not integers.
    pub fn integers(&self) -> Option<Vec<i64>> {
        let bytes = self.bytes()?;
        Some(match &*self.dtype {
            "bool" | "uint8" | "|u1" | "|b1" => bytes.iter().map(|&byte| i64::from(byte)).collect(),
            "int32" | "<i4" => bytes
                .chunks_exact(4)
                .map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                .collect(),
            "uint32" | "<u4" => bytes
                .chunks_exact(4)
                .map(|b| i64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                .collect(),
            "int64" | "<i8" => bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
                .collect(),
            _ => return None,
        })
    }

    /// The elements as 32-bit floats; `None` when they are out of band or neither 32- nor 64-bit
    /// floats.
    pub fn floats(&self) -> Option<Vec<f32>> {
        let bytes = self.bytes()?;
        Some(match &*self.dtype {
            "float32" | "<f4" => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            "float64" | "<f8" => bytes
                .chunks_exact(8)
                .map(|b| {
                    f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32
                })
                .collect(),
            _ => return None,
        })
    }
}

/// Bytes of `shape` elements; `None` past `usize`.
fn bytes_of(shape: &[usize], element: usize) -> Option<usize> {
    shape.iter().try_fold(element, |product, &dim| product.checked_mul(dim))
}

/// Bytes per element of a torch name or a numpy type string.
fn element_size(dtype: &str) -> Option<usize> {
    if let Some(dtype) = Dtype::from_torch_name(dtype) {
        return Some(dtype.size());
    }
    match dtype {
        "int8" => Some(1),
        "int16" | "uint16" => Some(2),
        "int32" | "uint32" => Some(4),
        "uint64" | "float64" => Some(8),
        // numpy: byte order, kind, bytes per element
        _ => match dtype.as_bytes() {
            [b'<' | b'|', b'b' | b'i' | b'u' | b'f', size @ b'1'..=b'8'] => {
                Some(usize::from(size - b'0'))
            }
            _ => None,
        },
    }
}

impl Wire for WireTensor {
    fn write(&self, to: &mut Writer) {
        to.array(3);
        to.str(&self.dtype);
        self.shape.write(to);
        match &self.data {
            TensorData::Bytes(bytes) => to.tensor_data(bytes),
            TensorData::Slot(slot) => to.tensor_data(&Bytes::from_owner(slot.clone())),
            TensorData::OutOfBand(map) => to.value(map),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let found = from.array()?;
        if found != 3 {
            return Err(Problem::TooShort { expected: 3, found }.at("tensor"));
        }
        let dtype = from.str().named("dtype")?;
        let dtype = match Dtype::from_torch_name(dtype) {
            Some(known) => Cow::Borrowed(known.torch_name()),
            None => Cow::Owned(dtype.to_owned()),
        };
        let shape = Vec::read(from).named("shape")?;
        let data = match from.peek()? {
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
                TensorData::OutOfBand(from.value().named("data")?)
            }
            Marker::FixPos(_) | Marker::U8 | Marker::U16 | Marker::U32 | Marker::U64 => {
                let index = u64::read(from).named("data")?;
                TensorData::Bytes(from.aux(index).named("data")?)
            }
            _ => match from.ext().named("data")? {
                (version::RAW_VIEW, bytes) => TensorData::Bytes(bytes),
                (kind, _) => {
                    return Err(Problem::Unsupported(format!("extension type {kind}")).at("data"));
                }
            },
        };
        let tensor = Self { dtype, shape, data };
        if let TensorData::Bytes(bytes) = &tensor.data
            && tensor.nbytes() != Some(bytes.len())
        {
            let Self { dtype, shape, .. } = &tensor;
            let problem = Problem::TensorSize {
                dtype: dtype.to_string(),
                shape: shape.clone(),
                bytes: bytes.len(),
            };
            return Err(problem.at("tensor"));
        }
        Ok(tensor)
    }
}
