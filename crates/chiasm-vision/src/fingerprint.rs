//! The bytes that stand for an image processor's settings in an item's identity.
//!
//! Engines keep tensors, and stores keep KV blocks, under identities made of these bytes, so they
//! must not depend on how the Rust code is written: each setting has a name that is part of the
//! format, not that of a field, and numbers are written as integers or by the bits of floats.
//! `tests/vision/fingerprints.rs` holds one golden per family. Changing one makes everything that
//! was ever stored for that family unknown; that must be a decision, never an accident.

use chiasm_types::TokenId;

use crate::ImageSize;
use crate::kernels::Filter;

/// The format, and the arithmetic that gives the settings their meaning. To be raised when the same
/// settings come to make other tensors or tokens.
const DOMAIN: &str = "chiasm image processor 1";

/// Writes settings one after the other: name, type, value, the name and the value with their
/// lengths before them. A setting without effect is left out, so that its value changes nothing.
#[derive(Debug)]
pub(crate) struct Fingerprint {
    bytes: Vec<u8>,
}

impl Fingerprint {
    pub(crate) fn of_family(model_type: &str) -> Self {
        let mut fingerprint = Self { bytes: DOMAIN.as_bytes().to_vec() };
        fingerprint.text("family", model_type);
        fingerprint
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    pub(crate) fn text(&mut self, name: &str, value: &str) {
        self.field(name, b't', value.as_bytes());
    }

    pub(crate) fn flag(&mut self, name: &str, value: bool) {
        self.field(name, b'b', &[value.into()]);
    }

    pub(crate) fn integer(&mut self, name: &str, value: impl Into<u64>) {
        self.integers(name, [value.into()]);
    }

    /// A count, which no model makes larger than 64 bits hold.
    pub(crate) fn count(&mut self, name: &str, value: usize) {
        self.integers(name, [value as u64]);
    }

    pub(crate) fn integers(&mut self, name: &str, values: impl IntoIterator<Item = u64>) {
        let values: Vec<u8> = values.into_iter().flat_map(u64::to_le_bytes).collect();
        self.field(name, b'i', &values);
    }

    pub(crate) fn double(&mut self, name: &str, value: f64) {
        self.field(name, b'd', &value.to_bits().to_le_bytes());
    }

    pub(crate) fn floats(&mut self, name: &str, values: &[f32]) {
        let values: Vec<u8> =
            values.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
        self.field(name, b'f', &values);
    }

    /// Width, then height.
    pub(crate) fn size(&mut self, name: &str, size: ImageSize) {
        self.integers(name, [size.width.into(), size.height.into()]);
    }

    pub(crate) fn tokens(&mut self, name: &str, tokens: &[TokenId]) {
        self.integers(name, tokens.iter().map(|token| token.0.into()));
    }

    pub(crate) fn filter(&mut self, name: &str, filter: Filter) {
        let filter = match filter {
            Filter::Bilinear => "bilinear",
            Filter::Bicubic => "bicubic",
            Filter::Lanczos => "lanczos",
        };
        self.text(name, filter);
    }

    fn field(&mut self, name: &str, kind: u8, value: &[u8]) {
        self.bytes.extend((name.len() as u64).to_le_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(kind);
        self.bytes.extend((value.len() as u64).to_le_bytes());
        self.bytes.extend(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_written_down() {
        let mut out = Fingerprint::of_family("x");
        out.flag("on", true);
        out.size("s", ImageSize { width: 2, height: 1 });
        out.double("d", 1.5);
        out.floats("f", &[-1.0]);
        out.filter("r", Filter::Lanczos);
        let length = |length: u8| [length, 0, 0, 0, 0, 0, 0, 0];
        let expected = [
            b"chiasm image processor 1".as_slice(),
            &[&length(6)[..], b"familyt", &length(1), b"x"].concat(),
            &[&length(2)[..], b"onb", &length(1), &[1]].concat(),
            &[&length(1)[..], b"si", &length(16), &length(2), &length(1)].concat(),
            &[&length(1)[..], b"dd", &length(8), &[0, 0, 0, 0, 0, 0, 0xf8, 0x3f]].concat(),
            &[&length(1)[..], b"ff", &length(4), &[0, 0, 0x80, 0xbf]].concat(),
            &[&length(1)[..], b"rt", &length(7), b"lanczos"].concat(),
        ];
        assert_eq!(out.into_bytes(), expected.concat());
    }

    #[test]
    fn where_a_value_ends_cannot_be_shifted() {
        let bytes = |fields: &[(&str, &str)]| {
            let mut out = Fingerprint::of_family("x");
            fields.iter().for_each(|(name, value)| out.text(name, value));
            out.into_bytes()
        };
        assert_ne!(bytes(&[("a", "bc")]), bytes(&[("ab", "c")]));
        assert_ne!(bytes(&[("a", "b"), ("c", "")]), bytes(&[("a", ""), ("c", "b")]));
        assert_ne!(bytes(&[("a", "")]), bytes(&[]));
    }
}
