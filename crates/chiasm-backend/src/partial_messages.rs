use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The maximum number of bytes that incomplete messages of one worker may buffer, without the first
/// [`FREE_BYTES`] of each message.
const MAX_BUFFERED_BYTES: usize = 256 << 20;
/// The bytes of each message that are not counted. Nearly all messages are shorter.
const FREE_BYTES: usize = 64 << 10;

/// The bytes that are buffered for incomplete long messages of one worker. Clones share the count.
///
/// The limit protects this process: a worker that begins many long messages and never completes
/// them could otherwise take all memory.
#[derive(Clone, Debug, Default)]
pub struct PartialMessages(Arc<AtomicUsize>);

/// The share of one answer in [`PartialMessages`], released on drop.
#[derive(Debug)]
pub struct PartialMessage {
    messages: PartialMessages,
    counted_bytes: usize,
}

impl PartialMessages {
    /// Returns the share of a new answer, with nothing buffered.
    pub fn start_message(&self) -> PartialMessage {
        PartialMessage { messages: self.clone(), counted_bytes: 0 }
    }
}

impl PartialMessage {
    /// Sets the number of bytes that are buffered for this answer. Returns `false` if the worker's
    /// answers together exceed the limit with them.
    pub fn set_buffered_bytes(&mut self, buffered: usize) -> bool {
        let before = self.counted_bytes;
        let now = buffered.saturating_sub(FREE_BYTES);
        if before == now {
            return true;
        }
        self.counted_bytes = now;
        if now < before {
            self.messages.0.fetch_sub(before - now, Relaxed);
            return true;
        }
        self.messages.0.fetch_add(now - before, Relaxed) + (now - before) <= MAX_BUFFERED_BYTES
    }
}

impl Drop for PartialMessage {
    fn drop(&mut self) {
        self.messages.0.fetch_sub(self.counted_bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_of_one_worker_share_a_limit() {
        let messages = PartialMessages::default();
        let mut started: Vec<_> = (0..4).map(|_| messages.start_message()).collect();
        for long in &mut started {
            assert!(long.set_buffered_bytes(1 << 20) && long.set_buffered_bytes(64 << 20));
        }
        let mut excess = messages.start_message();
        assert!(excess.set_buffered_bytes(FREE_BYTES), "short messages are always allowed");
        assert!(!excess.set_buffered_bytes(1 << 20));
        drop(excess);
        // The first message is complete.
        assert!(started[0].set_buffered_bytes(0));
        assert!(messages.start_message().set_buffered_bytes(1 << 20));
        drop(started);
        assert_eq!(messages.0.load(Relaxed), 0);
    }
}
