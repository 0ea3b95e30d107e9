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
    /// The element type: a torch name (`uint8`, `bfloat16`) or, from numpy, an array-interface
    /// string (`<i4`).
    pub dtype: Cow<'static, str>,
    /// The number of elements per dimension; empty for a scalar.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: TensorData,
}

/// The bytes of a tensor, or a reference to them.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// Bytes in the message: inline below 256 bytes, otherwise as an aux frame without a copy.
    Bytes(Bytes),
    /// A slot of shared memory. The client lends it to the slot's engine and sends it
    /// [out of band](Self::OutOfBand). Encoding a slot copies its bytes into the message.
    Slot(Slot),
    /// A map with which a plugin in the engine finds the bytes elsewhere (vLLM's
    /// `OOBTensorProvider`).
    OutOfBand(Value),
}

impl WireTensor {
    /// Creates a tensor from its bytes. Returns `None` if `data` does not have the size of `shape`
    /// elements of `dtype`.
    pub fn new(dtype: Dtype, shape: Vec<usize>, data: Bytes) -> Option<Self> {
        Self::checked(dtype, shape, data.len(), TensorData::Bytes(data))
    }

    /// Creates a tensor from a slot of shared memory. Returns `None` if the slot does not have the
    /// size of `shape` elements of `dtype`.
    pub fn in_slot(dtype: Dtype, shape: Vec<usize>, slot: Slot) -> Option<Self> {
        Self::checked(dtype, shape, slot.len(), TensorData::Slot(slot))
    }

    fn checked(dtype: Dtype, shape: Vec<usize>, bytes: usize, data: TensorData) -> Option<Self> {
        let fits = size_in_bytes(&shape, dtype.size()) == Some(bytes);
        fits.then(|| Self { dtype: Cow::Borrowed(dtype.torch_name()), shape, data })
    }

    /// Returns the number of elements; `None` if it exceeds `usize`.
    pub fn elements(&self) -> Option<usize> {
        size_in_bytes(&self.shape, 1)
    }

    /// Returns the number of bytes that the shape needs; `None` for an unknown dtype.
    pub fn nbytes(&self) -> Option<usize> {
        size_in_bytes(&self.shape, element_size(&self.dtype)?)
    }

    /// Returns the bytes, unless they are out of band.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.data {
            TensorData::Bytes(bytes) => Some(bytes),
            TensorData::Slot(slot) => Some(slot),
            TensorData::OutOfBand(_) => None,
        }
    }

    /// Returns the elements as integers; `None` if they are out of band or not integers.
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

    /// Returns the elements as 32-bit floats; `None` if they are out of band, or neither 32- nor
    /// 64-bit floats.
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

/// Returns the size of `shape` elements of `element` bytes each; `None` if it exceeds `usize`.
fn size_in_bytes(shape: &[usize], element: usize) -> Option<usize> {
    shape.iter().try_fold(element, |product, &dim| product.checked_mul(dim))
}

/// Returns the size of an element in bytes, by its torch name or numpy type string.
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
