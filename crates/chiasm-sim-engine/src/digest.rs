//! A tensor's bytes in short.

use std::fmt;

use tokio::runtime::{Handle, RuntimeFlavor};

/// Shorter work is not worth a handover between threads.
const LONG: usize = 128 << 10;

/// Equal for equal bytes. Shown as 8 hex digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(blake3::Hash);

impl Digest {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let hash = || Self(blake3::hash(bytes));
        let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
        match bytes.len() >= LONG && matches!(flavor, Ok(RuntimeFlavor::MultiThread)) {
            // The engine shares its runtime with others, who need not wait.
            true => tokio::task::block_in_place(hash),
            false => hash(),
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
    fn one_byte_makes_another_digest_of_eight_digits() {
        let mut bytes = vec![7; 2 * LONG];
        let before = Digest::of(&bytes);
        assert_eq!(Digest::of(&bytes), before);
        bytes[LONG] = 8;
        assert_ne!(Digest::of(&bytes), before);
        let shown = before.to_string();
        assert!(shown.len() == 8 && u32::from_str_radix(&shown, 16).is_ok(), "{shown}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn it_is_the_same_on_a_worker_thread() {
        let bytes = vec![7; LONG];
        let there = tokio::spawn(async { Digest::of(&[7; LONG]) });
        assert_eq!(there.await.unwrap(), Digest::of(&bytes));
    }
}
