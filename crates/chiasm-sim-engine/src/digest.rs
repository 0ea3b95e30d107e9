//! A short digest of a tensor's bytes.

use std::fmt;

use tokio::runtime::{Handle, RuntimeFlavor};

/// The minimum size for blocking work. Shorter work is not worth a handover between threads.
const MIN_BLOCKING_BYTES: usize = 128 << 10;

/// A digest of bytes, displayed as 8 hex digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(blake3::Hash);

impl Digest {
    pub(crate) fn compute(bytes: &[u8]) -> Self {
        let hash = || Self(blake3::hash(bytes));
        let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
        if bytes.len() >= MIN_BLOCKING_BYTES && matches!(flavor, Ok(RuntimeFlavor::MultiThread)) {
            // The engine shares its runtime with other tasks, which need not wait.
            tokio::task::block_in_place(hash)
        } else {
            hash()
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_hex()[..8])
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_changes_with_one_byte() {
        let mut bytes = vec![7; 2 * MIN_BLOCKING_BYTES];
        let before = Digest::compute(&bytes);
        assert_eq!(Digest::compute(&bytes), before);
        bytes[MIN_BLOCKING_BYTES] = 8;
        assert_ne!(Digest::compute(&bytes), before);
        let shown = before.to_string();
        assert!(shown.len() == 8 && u32::from_str_radix(&shown, 16).is_ok(), "{shown}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn digest_is_equal_on_a_worker_thread() {
        let bytes = vec![7; MIN_BLOCKING_BYTES];
        let there = tokio::spawn(async { Digest::compute(&[7; MIN_BLOCKING_BYTES]) });
        assert_eq!(there.await.unwrap(), Digest::compute(&bytes));
    }
}
