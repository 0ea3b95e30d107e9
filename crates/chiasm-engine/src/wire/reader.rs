//! A reader of msgpack that has access to the message's aux frames.

use bytes::Bytes;
use rmp::Marker;
use rmpv::Value;

use super::error::{Problem, WireError};

/// The maximum nesting of values. No real message nests deeper, and a hostile one must not exhaust
/// the stack.
const MAX_DEPTH: usize = 64;

/// The maximum number of list elements to reserve memory for before they are read: a hostile sender
/// can claim any length.
const MAX_RESERVED: usize = 1024;

/// A position in the msgpack frame of a message.
pub(crate) struct Reader<'a> {
    frames: &'a [Bytes],
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Creates a reader of the first frame, which holds the msgpack. The others are aux frames.
    pub(crate) fn new(frames: &'a [Bytes]) -> Result<Self, WireError> {
        let rest = frames.first().ok_or_else(|| Problem::Missing.at("msgpack frame"))?;
        Ok(Self { frames, rest })
    }

    /// Returns the aux frame with this index. As in vLLM, the msgpack frame has index 0.
    pub(crate) fn aux(&self, index: u64) -> Result<Bytes, WireError> {
        usize::try_from(index)
            .ok()
            .filter(|&index| index > 0)
            .and_then(|index| self.frames.get(index))
            .cloned()
            .ok_or_else(|| Problem::MissingFrame { index, frames: self.frames.len() }.at(""))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) =
            self.rest.split_at_checked(len).ok_or_else(|| Problem::Truncated.at(""))?;
        self.rest = rest;
        Ok(taken)
    }

    /// Skips these bytes. Returns `false`, and reads nothing, if other bytes come next.
    pub(crate) fn skip_prefix(&mut self, bytes: &[u8]) -> bool {
        let rest = self.rest.strip_prefix(bytes);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Reads a big-endian unsigned integer of `len` bytes, at most 8.
    fn big_endian(&mut self, len: usize) -> Result<u64, WireError> {
        Ok(self.take(len)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn len(&mut self, bytes: usize) -> Result<usize, WireError> {
        Ok(self.big_endian(bytes)? as usize)
    }

    fn peek_byte(&self) -> Result<u8, WireError> {
        self.rest.first().copied().ok_or_else(|| Problem::Truncated.at(""))
    }

    /// Returns the type of the next value without reading it.
    pub(crate) fn peek(&self) -> Result<Marker, WireError> {
        Ok(Marker::from_u8(self.peek_byte()?))
    }

    fn marker(&mut self) -> Result<Marker, WireError> {
        Ok(Marker::from_u8(self.take(1)?[0]))
    }

    /// Returns the error for a next value of another type than `expected`.
    pub(crate) fn mismatch(&self, expected: &'static str) -> WireError {
        match self.peek_byte() {
            Ok(marker) => Problem::Type { expected, marker }.at(""),
            Err(error) => error,
        }
    }

    /// Skips a nil. Returns `false`, and reads nothing, if the next value is not nil.
    pub(crate) fn take_nil(&mut self) -> Result<bool, WireError> {
        let nil = self.peek()? == Marker::Null;
        if nil {
            self.rest = &self.rest[1..];
        }
        Ok(nil)
    }

    pub(crate) fn bool(&mut self) -> Result<bool, WireError> {
        let value = match self.peek()? {
            Marker::True => true,
            Marker::False => false,
            _ => return Err(self.mismatch("a bool")),
        };
        self.rest = &self.rest[1..];
        Ok(value)
    }

    /// Reads an integer of any width and sign.
    pub(crate) fn int(&mut self) -> Result<i128, WireError> {
        let (width, signed) = match self.peek()? {
            Marker::FixPos(value) => {
                self.rest = &self.rest[1..];
                return Ok(i128::from(value));
            }
            Marker::FixNeg(value) => {
                self.rest = &self.rest[1..];
                return Ok(i128::from(value));
            }
            Marker::U8 => (1, false),
            Marker::U16 => (2, false),
            Marker::U32 => (4, false),
            Marker::U64 => (8, false),
            Marker::I8 => (1, true),
            Marker::I16 => (2, true),
            Marker::I32 => (4, true),
            Marker::I64 => (8, true),
            _ => return Err(self.mismatch("an integer")),
        };
        self.rest = &self.rest[1..];
        let bits = self.big_endian(width)?;
        if !signed {
            return Ok(i128::from(bits));
        }
        let unused = 64 - 8 * width as u32;
        Ok(i128::from((bits << unused) as i64 >> unused))
    }

    /// Reads a float, or an integer in its place: Python writes either.
    pub(crate) fn float(&mut self) -> Result<f64, WireError> {
        match self.peek()? {
            Marker::F64 => {
                self.rest = &self.rest[1..];
                Ok(f64::from_bits(self.big_endian(8)?))
            }
            Marker::F32 => {
                self.rest = &self.rest[1..];
                Ok(f64::from(f32::from_bits(self.big_endian(4)? as u32)))
            }
            Marker::FixPos(_)
            | Marker::FixNeg(_)
            | Marker::U8
            | Marker::U16
            | Marker::U32
            | Marker::U64
            | Marker::I8
            | Marker::I16
            | Marker::I32
            | Marker::I64 => Ok(self.int()? as f64),
            _ => Err(self.mismatch("a number")),
        }
    }

    pub(crate) fn str(&mut self) -> Result<&'a str, WireError> {
        let marker = self.peek()?;
        let width = match marker {
            Marker::FixStr(_) => 0,
            Marker::Str8 => 1,
            Marker::Str16 => 2,
            Marker::Str32 => 4,
            _ => return Err(self.mismatch("a string")),
        };
        self.rest = &self.rest[1..];
        let len = match marker {
            Marker::FixStr(len) => usize::from(len),
            _ => self.len(width)?,
        };
        std::str::from_utf8(self.take(len)?).map_err(|_| Problem::Utf8.at(""))
    }

    /// Reads the header of an array and returns its number of elements.
    pub(crate) fn array(&mut self) -> Result<usize, WireError> {
        let marker = self.peek()?;
        let width = match marker {
            Marker::FixArray(_) => 0,
            Marker::Array16 => 2,
            Marker::Array32 => 4,
            _ => return Err(self.mismatch("an array")),
        };
        self.rest = &self.rest[1..];
        match marker {
            Marker::FixArray(len) => Ok(usize::from(len)),
            _ => self.len(width),
        }
    }

    /// Reads the header of a map and returns its number of entries.
    pub(crate) fn map(&mut self) -> Result<usize, WireError> {
        let marker = self.peek()?;
        let width = match marker {
            Marker::FixMap(_) => 0,
            Marker::Map16 => 2,
            Marker::Map32 => 4,
            _ => return Err(self.mismatch("a map")),
        };
        self.rest = &self.rest[1..];
        match marker {
            Marker::FixMap(len) => Ok(usize::from(len)),
            _ => self.len(width),
        }
    }

    /// Reads an array, each element with `read`.
    pub(crate) fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let len = self.array()?;
        let mut list = Vec::with_capacity(len.min(self.rest.len()).min(MAX_RESERVED));
        for _ in 0..len {
            list.push(read(self)?);
        }
        Ok(list)
    }

    /// Reads an extension value. Returns its type and its bytes, which share the frame's memory.
    pub(crate) fn ext(&mut self) -> Result<(i8, Bytes), WireError> {
        let expected = "an extension value";
        let marker = self.peek()?;
        let is_ext = self.ext_len_width(marker).is_some();
        if !is_ext {
            return Err(self.mismatch(expected));
        }
        self.rest = &self.rest[1..];
        let len = self.ext_len(marker)?;
        let kind = self.take(1)?[0] as i8;
        let data = self.take(len)?;
        Ok((kind, self.frames[0].slice_ref(data)))
    }

    fn ext_len_width(&self, marker: Marker) -> Option<usize> {
        match marker {
            Marker::FixExt1
            | Marker::FixExt2
            | Marker::FixExt4
            | Marker::FixExt8
            | Marker::FixExt16 => Some(0),
            Marker::Ext8 => Some(1),
            Marker::Ext16 => Some(2),
            Marker::Ext32 => Some(4),
            _ => None,
        }
    }

    fn ext_len(&mut self, marker: Marker) -> Result<usize, WireError> {
        match marker {
            Marker::FixExt1 => Ok(1),
            Marker::FixExt2 => Ok(2),
            Marker::FixExt4 => Ok(4),
            Marker::FixExt8 => Ok(8),
            Marker::FixExt16 => Ok(16),
            Marker::Ext8 => self.len(1),
            Marker::Ext16 => self.len(2),
            _ => self.len(4),
        }
    }

    /// Returns `true` if the next value is an array that starts with a string, as tensors do. Reads
    /// nothing.
    pub(crate) fn peek_is_tensor(&self) -> Result<bool, WireError> {
        let mut ahead = Reader { frames: self.frames, rest: self.rest };
        let starts_with_string = ahead.array()? > 0
            && matches!(
                ahead.peek()?,
                Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32
            );
        Ok(starts_with_string)
    }

    /// Returns `true` if the next value is an array that starts with an array. Reads nothing.
    pub(crate) fn peek_is_nested(&self) -> Result<bool, WireError> {
        let mut ahead = Reader { frames: self.frames, rest: self.rest };
        let starts_with_array = ahead.array()? > 0
            && matches!(ahead.peek()?, Marker::FixArray(_) | Marker::Array16 | Marker::Array32);
        Ok(starts_with_array)
    }

    /// Skips one value of any type and depth.
    pub(crate) fn skip(&mut self) -> Result<(), WireError> {
        // A counter replaces recursion. Each round consumes a byte, so the loop ends with the
        // message.
        let mut pending: u64 = 1;
        while pending > 0 {
            pending -= 1;
            let marker = self.marker()?;
            let bytes = match marker {
                Marker::Null
                | Marker::True
                | Marker::False
                | Marker::FixPos(_)
                | Marker::FixNeg(_) => 0,
                Marker::U8 | Marker::I8 => 1,
                Marker::U16 | Marker::I16 => 2,
                Marker::U32 | Marker::I32 | Marker::F32 => 4,
                Marker::U64 | Marker::I64 | Marker::F64 => 8,
                Marker::FixStr(len) => usize::from(len),
                Marker::Str8 | Marker::Bin8 => self.len(1)?,
                Marker::Str16 | Marker::Bin16 => self.len(2)?,
                Marker::Str32 | Marker::Bin32 => self.len(4)?,
                Marker::FixArray(len) => {
                    pending = pending.saturating_add(u64::from(len));
                    0
                }
                Marker::Array16 => {
                    pending = pending.saturating_add(self.big_endian(2)?);
                    0
                }
                Marker::Array32 => {
                    pending = pending.saturating_add(self.big_endian(4)?);
                    0
                }
                Marker::FixMap(len) => {
                    pending = pending.saturating_add(2 * u64::from(len));
                    0
                }
                Marker::Map16 => {
                    pending = pending.saturating_add(2 * self.big_endian(2)?);
                    0
                }
                Marker::Map32 => {
                    pending = pending.saturating_add(2 * self.big_endian(4)?);
                    0
                }
                Marker::Reserved => {
                    return Err(Problem::Type { expected: "a value", marker: 0xc1 }.at(""));
                }
                ext => 1 + self.ext_len(ext)?,
            };
            self.take(bytes)?;
        }
        Ok(())
    }

    /// Reads one value of any type.
    pub(crate) fn value(&mut self) -> Result<Value, WireError> {
        rmpv::decode::read_value_with_max_depth(&mut self.rest, MAX_DEPTH).map_err(|error| {
            match error {
                rmpv::decode::Error::DepthLimitExceeded => Problem::TooDeep.at(""),
                _ => Problem::Truncated.at(""),
            }
        })
    }
}
