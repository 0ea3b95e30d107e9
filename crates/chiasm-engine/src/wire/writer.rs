//! A writer of msgpack that collects large tensors as aux frames.

use bytes::Bytes;
use chiasm_types::TokenId;
use rmp::Marker;
use rmp::encode;
use rmpv::Value;

use super::version;

/// A message under construction.
#[derive(Default)]
pub(crate) struct Writer {
    packed: Vec<u8>,
    aux: Vec<Bytes>,
}

/// The size of a token's longest encoding: a marker and four bytes.
const MAX_TOKEN_BYTES: usize = 1 + size_of::<u32>();

/// The encoding of a number, in the high bytes of a big-endian `u64`: a marker, if any, then the
/// bytes of the number.
#[derive(Clone, Copy)]
struct Form {
    /// The marker, at its position in the `u64`.
    marker: u64,
    /// The number of bits by which the number is shifted to its position.
    shift: u8,
    /// The number of bytes in total.
    len: u8,
}

/// The shortest form of a number, by its number of significant bits.
const FORMS: [Form; 33] = {
    let mut forms = [Form { marker: 0, shift: 56, len: 1 }; 33];
    let mut bits = 8;
    while bits < forms.len() {
        let (marker, bytes) = match bits {
            8 => (Marker::U8, 1),
            9..=16 => (Marker::U16, 2),
            _ => (Marker::U32, 4),
        };
        forms[bits] =
            Form { marker: (marker.to_u8() as u64) << 56, shift: 56 - 8 * bytes, len: 1 + bytes };
        bits += 1;
    }
    forms
};

/// Ignores the result of writing to a `Vec`, which can't fail.
fn infallible<T, E>(_: Result<T, E>) {}

impl Writer {
    /// Returns the msgpack frame, followed by the aux frames.
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

    /// Writes each token in its shortest form, as [`uint`](Self::uint) does, in chunks.
    ///
    /// The lengths of tokens are unpredictable, so the loop does not branch on them: it writes
    /// eight bytes per token and advances by the token's length.
    pub(crate) fn tokens(&mut self, tokens: &[TokenId]) {
        const CHUNK: usize = 256;
        self.packed.reserve(tokens.len() * MAX_TOKEN_BYTES);
        for chunk in tokens.chunks(CHUNK) {
            let mut packed = [0; CHUNK * MAX_TOKEN_BYTES + size_of::<u64>()];
            let mut end = 0;
            for &TokenId(id) in chunk {
                let Form { marker, shift, len } = FORMS[(u32::BITS - id.leading_zeros()) as usize];
                let bytes = marker | u64::from(id) << shift;
                packed[end..end + size_of::<u64>()].copy_from_slice(&bytes.to_be_bytes());
                end += usize::from(len);
            }
            self.packed.extend_from_slice(&packed[..end]);
        }
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

    /// Writes a tensor's bytes if they are few, or else the index of a new aux frame that shares
    /// the memory of `data`.
    pub(crate) fn tensor_data(&mut self, data: &Bytes) {
        if data.len() < version::INLINE_LIMIT_BYTES {
            infallible(encode::write_ext_meta(
                &mut self.packed,
                data.len() as u32,
                version::RAW_VIEW,
            ));
            self.packed.extend_from_slice(data);
        } else {
            self.aux.push(data.clone());
            self.uint(self.aux.len() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn token_list_equals_single_tokens(
            ids in proptest::collection::vec(
                (any::<u32>(), 0u32..32).prop_map(|(id, shift)| TokenId(id >> shift)),
                0..600,
            )
        ) {
            let mut list = Writer::default();
            let mut single = Writer::default();
            list.tokens(&ids);
            ids.iter().for_each(|id| single.uint(id.0.into()));
            prop_assert_eq!(list.packed, single.packed);
        }
    }

    #[test]
    fn boundary_tokens_have_their_shortest_form() {
        let ids = [0, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000, u32::MAX];
        let lengths = ids.map(|id| {
            let mut to = Writer::default();
            to.tokens(&[TokenId(id)]);
            assert_eq!(rmp::decode::read_int::<u32, _>(&mut &to.packed[..]).unwrap(), id);
            to.packed.len()
        });
        assert_eq!(lengths, [1, 1, 2, 2, 3, 3, 5, 5]);
    }
}
