//! Writes msgpack, setting large tensors aside as aux frames.

use bytes::Bytes;
use rmp::encode;
use rmpv::Value;

use super::version;

/// A message under construction.
#[derive(Default)]
pub(crate) struct Writer {
    packed: Vec<u8>,
    aux: Vec<Bytes>,
}

/// Writing to a `Vec` cannot fail; the codec's results exist for other sinks.
fn infallible<T, E>(_: Result<T, E>) {}

impl Writer {
    /// The msgpack frame and the aux frames after it.
    pub(crate) fn into_frames(self) -> Vec<Bytes> {
        let mut frames = Vec::with_capacity(1 + self.aux.len());
        frames.push(Bytes::from(self.packed));
        frames.extend(self.aux);
        frames
    }

    pub(crate) fn nil(&mut self) {
        infallible(encode::write_nil(&mut self.packed));
    }

    pub(crate) fn bool(&mut self, value: bool) {
        infallible(encode::write_bool(&mut self.packed, value));
    }

    pub(crate) fn uint(&mut self, value: u64) {
        infallible(encode::write_uint(&mut self.packed, value));
    }

    pub(crate) fn int(&mut self, value: i64) {
        infallible(encode::write_sint(&mut self.packed, value));
    }

    pub(crate) fn float(&mut self, value: f64) {
        infallible(encode::write_f64(&mut self.packed, value));
    }

    pub(crate) fn str(&mut self, value: &str) {
        infallible(encode::write_str(&mut self.packed, value));
    }

    pub(crate) fn array(&mut self, len: usize) {
        infallible(encode::write_array_len(&mut self.packed, len as u32));
    }

    pub(crate) fn map(&mut self, len: usize) {
        infallible(encode::write_map_len(&mut self.packed, len as u32));
    }

    pub(crate) fn value(&mut self, value: &Value) {
        infallible(rmpv::encode::write_value(&mut self.packed, value));
    }

    /// A tensor's bytes: inline when small, else the index of a new aux frame that shares `data`'s memory.
    pub(crate) fn tensor_data(&mut self, data: &Bytes) {
        if data.len() < version::INLINE_LIMIT {
            infallible(encode::write_ext_meta(&mut self.packed, data.len() as u32, version::RAW_VIEW));
            self.packed.extend_from_slice(data);
        } else {
            self.aux.push(data.clone());
            self.uint(self.aux.len() as u64);
        }
    }
}
