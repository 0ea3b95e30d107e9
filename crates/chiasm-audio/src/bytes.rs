//! Integers at positions of a byte slice.

/// Returns `N` bytes at `at`, or `None` past the end.
pub(crate) fn array_at<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..)?.first_chunk().copied()
}

/// Returns the little-endian 16-bit integer at `at`.
pub(crate) fn u16_le_at(data: &[u8], at: usize) -> Option<u16> {
    array_at(data, at).map(u16::from_le_bytes)
}

/// Returns the little-endian 32-bit integer at `at`.
pub(crate) fn u32_le_at(data: &[u8], at: usize) -> Option<u32> {
    array_at(data, at).map(u32::from_le_bytes)
}

/// Returns the big-endian 32-bit integer at `at`.
pub(crate) fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    array_at(data, at).map(u32::from_be_bytes)
}
