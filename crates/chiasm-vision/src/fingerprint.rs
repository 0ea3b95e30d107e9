//! A canonical encoding of an image processor's settings, used in the identity of media items.
//!
//! Engines cache tensors, and stores keep KV blocks, under identities made of these bytes. The
//! bytes must therefore not depend on the Rust code: each setting has a name that belongs to the
//! format and not to a field, and numbers are written as integers or as the bits of floats.
//! `tests/vision/fingerprints.rs` holds one golden per family. A changed golden invalidates
//! everything stored for that family, so it must be a deliberate decision.

use chiasm_types::TokenId;

use crate::ImageSize;
use crate::kernels::Filter;

/// The version of the format and of the arithmetic behind the settings.
///
/// Raise it when the same settings start to produce other tensors or tokens.
const DOMAIN: &str = "chiasm image processor 1";

/// A writer of settings: each one is a length-prefixed name, a type byte and a length-prefixed
/// value.
///
/// Callers leave out settings without effect, so that their values do not change the bytes.
#[derive(Debug)]
pub(crate) struct Fingerprint {
    bytes: Vec<u8>,
}

impl Fingerprint {
    /// Starts the fingerprint of a family.
    pub(crate) fn for_family(model_type: &str) -> Self {
        let mut fingerprint = Self { bytes: DOMAIN.as_bytes().to_vec() };
        fingerprint.text("family", model_type);
        fingerprint
    }

    /// Returns the bytes written so far.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Writes a string.
    pub(crate) fn text(&mut self, name: &str, value: &str) {
        self.field(name, b't', value.as_bytes());
    }

    /// Writes a boolean as one byte.
    pub(crate) fn flag(&mut self, name: &str, value: bool) {
        self.field(name, b'b', &[value.into()]);
    }

    /// Writes an integer as 64 bits, little-endian.
    pub(crate) fn integer(&mut self, name: &str, value: impl Into<u64>) {
        self.integers(name, [value.into()]);
    }

    /// Writes a count as an integer. A `usize` always fits into 64 bits.
    pub(crate) fn count(&mut self, name: &str, value: usize) {
        self.integers(name, [value as u64]);
    }

    /// Writes a list of integers of 64 bits each, little-endian.
    pub(crate) fn integers(&mut self, name: &str, values: impl IntoIterator<Item = u64>) {
        let values: Vec<u8> = values.into_iter().flat_map(u64::to_le_bytes).collect();
        self.field(name, b'i', &values);
    }

    /// Writes the bits of a 64-bit float.
    pub(crate) fn double(&mut self, name: &str, value: f64) {
        self.field(name, b'd', &value.to_bits().to_le_bytes());
    }

    /// Writes the bits of 32-bit floats.
    pub(crate) fn floats(&mut self, name: &str, values: &[f32]) {
        let values: Vec<u8> =
            values.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect();
        self.field(name, b'f', &values);
    }

    /// Writes the width, then the height.
    pub(crate) fn size(&mut self, name: &str, size: ImageSize) {
        self.integers(name, [size.width.into(), size.height.into()]);
    }

    /// Writes token ids as integers.
    pub(crate) fn tokens(&mut self, name: &str, tokens: &[TokenId]) {
        self.integers(name, tokens.iter().map(|token| token.0.into()));
    }

    /// Writes the name of a filter.
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
    fn fields_are_written_in_documented_format() {
        let mut out = Fingerprint::for_family("x");
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
    fn shifted_field_boundary_changes_the_bytes() {
        let bytes = |fields: &[(&str, &str)]| {
            let mut out = Fingerprint::for_family("x");
            fields.iter().for_each(|(name, value)| out.text(name, value));
            out.into_bytes()
        };
        assert_ne!(bytes(&[("a", "bc")]), bytes(&[("ab", "c")]));
        assert_ne!(bytes(&[("a", "b"), ("c", "")]), bytes(&[("a", ""), ("c", "b")]));
        assert_ne!(bytes(&[("a", "")]), bytes(&[]));
    }
}
