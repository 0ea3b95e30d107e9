use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Most bytes that a worker may have begun to say, in all of its answers, of which those up to
/// [`FREE`] bytes of each count as nothing.
const MOST_BEGUN: usize = 256 << 20;
/// More than nearly all messages have.
const FREE: usize = 64 << 10;

/// Bytes of long messages that one worker has begun and not ended. A worker that begins them and
/// says no more must not take all memory with the requests that it is given. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct Begun(Arc<AtomicUsize>);

/// What one answer has of them, which ends with the answer.
#[derive(Debug)]
pub struct BegunPart {
    begun: Begun,
    bytes: usize,
}

impl Begun {
    /// An answer of which nothing has come.
    pub fn part(&self) -> BegunPart {
        BegunPart { begun: self.clone(), bytes: 0 }
    }
}

impl BegunPart {
    /// Counts that so many bytes of the answer have come and were not taken. False if the worker
    /// has begun too much, as others may have.
    pub fn has_room_for(&mut self, came: usize) -> bool {
        let (before, now) = (self.bytes, came.saturating_sub(FREE));
        if before == now {
            return true;
        }
        self.bytes = now;
        if now < before {
            self.begun.0.fetch_sub(before - now, Relaxed);
            return true;
        }
        self.begun.0.fetch_add(now - before, Relaxed) + (now - before) <= MOST_BEGUN
    }
}

impl Drop for BegunPart {
    fn drop(&mut self) {
        self.begun.0.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_of_one_worker_are_bounded_together() {
        let begun = Begun::default();
        let mut all: Vec<_> = (0..4).map(|_| begun.part()).collect();
        for long in &mut all {
            assert!(long.has_room_for(1 << 20) && long.has_room_for(64 << 20));
        }
        let mut more = begun.part();
        assert!(more.has_room_for(FREE), "short ones are not kept from anybody");
        assert!(!more.has_room_for(1 << 20));
        drop(more);
        // One has come whole.
        assert!(all[0].has_room_for(0));
        assert!(begun.part().has_room_for(1 << 20));
        drop(all);
        assert_eq!(begun.0.load(Relaxed), 0);
    }
}
