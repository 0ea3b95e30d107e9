//! Writes msgpack, setting large tensors aside as aux frames.

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

/// Bytes of a token in its longest form.
const LONGEST: usize = 1 + size_of::<u32>();

/// How a number is written: a marker, if it has one, and then as many of its bytes as it needs,
/// from the highest byte of eight down.
#[derive(Clone, Copy)]
struct Form {
    /// The marker, where it stands among the eight bytes.
    marker: u64,
    /// Bits by which the number is shifted to its place.
    shift: u8,
    /// Bytes in all.
    kept: u8,
}

/// The form of a number by how many bits it has.
const FORMS: [Form; 33] = {
    let mut forms = [Form { marker: 0, shift: 56, kept: 1 }; 33];
    let mut bits = 8;
    while bits < forms.len() {
        let (marker, bytes) = match bits {
            8 => (Marker::U8, 1),
            9..=16 => (Marker::U16, 2),
            _ => (Marker::U32, 4),
        };
        forms[bits] =
            Form { marker: (marker.to_u8() as u64) << 56, shift: 56 - 8 * bytes, kept: 1 + bytes };
        bits += 1;
    }
    forms
};

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

    /// Each in its shortest form, as [`uint`](Self::uint) writes it, a chunk at a time into room
    /// made before. Lengths of tokens can't be guessed, so nothing is decided by them: eight bytes
    /// are written, and as many kept as it has.
    pub(crate) fn tokens(&mut self, tokens: &[TokenId]) {
        const CHUNK: usize = 256;
        self.packed.reserve(tokens.len() * LONGEST);
        for chunk in tokens.chunks(CHUNK) {
            let mut packed = [0; CHUNK * LONGEST + size_of::<u64>()];
            let mut len = 0;
            for &TokenId(id) in chunk {
                let Form { marker, shift, kept } = FORMS[(u32::BITS - id.leading_zeros()) as usize];
                let bytes = marker | u64::from(id) << shift;
                packed[len..len + size_of::<u64>()].copy_from_slice(&bytes.to_be_bytes());
                len += usize::from(kept);
            }
            self.packed.extend_from_slice(&packed[..len]);
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

    /// A tensor's bytes: inline when small, else the index of a new aux frame that shares `data`'s
    /// memory.
    pub(crate) fn tensor_data(&mut self, data: &Bytes) {
        if data.len() < version::INLINE_LIMIT {
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
        fn a_list_of_tokens_is_what_one_after_the_other_is(
            ids in proptest::collection::vec((any::<u32>(), 0u32..32).prop_map(|(id, shift)| TokenId(id >> shift)), 0..600)
        ) {
            let (mut together, mut alone) = (Writer::default(), Writer::default());
            together.tokens(&ids);
            ids.iter().for_each(|id| alone.uint(id.0.into()));
            prop_assert_eq!(together.packed, alone.packed);
        }
    }

    #[test]
    fn tokens_at_the_ends_of_each_form_are_in_their_shortest() {
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
