//! Growing the lists of events, with a count of the bytes that it takes.

/// Reserves room for `more` elements, and adds the bytes that were allocated to `kept`.
#[inline]
pub(super) fn room<T>(list: &mut Vec<T>, more: usize, kept: &mut usize) {
    let before = list.capacity();
    if before - list.len() < more {
        list.reserve(more);
        *kept += (list.capacity() - before) * size_of::<T>();
    }
}
