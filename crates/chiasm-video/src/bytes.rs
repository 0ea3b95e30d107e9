//! Big-endian integers at positions of a byte slice.

/// Returns `N` bytes at `at`, or `None` past the end.
pub(crate) fn array_at<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..)?.first_chunk().copied()
}

/// Returns the 16-bit integer at `at`.
pub(crate) fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    array_at(data, at).map(u16::from_be_bytes)
}

/// Returns the 32-bit integer at `at`.
pub(crate) fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    array_at(data, at).map(u32::from_be_bytes)
}

/// Returns the signed 32-bit integer at `at`.
pub(crate) fn i32_at(data: &[u8], at: usize) -> Option<i32> {
    array_at(data, at).map(i32::from_be_bytes)
}

/// Returns the 64-bit integer at `at`.
pub(crate) fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    array_at(data, at).map(u64::from_be_bytes)
}
