//! Growing lists, with a count of the allocated bytes.

/// Reserves room for `more` elements and adds the newly allocated bytes to `kept_bytes`.
#[inline]
pub(super) fn reserve<T>(list: &mut Vec<T>, more: usize, kept_bytes: &mut usize) {
    let before = list.capacity();
    if before - list.len() < more {
        list.reserve(more);
        *kept_bytes += (list.capacity() - before) * size_of::<T>();
    }
}
