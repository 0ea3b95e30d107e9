//! The allocator of this process, and the return of free memory to the system.

/// Requests allocate and free bodies, images and many small things on different threads. glibc's
/// allocator has up to eight pools per core for that, from which memory rarely returns; this one
/// takes as little time, and gives back what is free.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[allow(unsafe_code)]
// SAFETY: `mimalloc.h` declares `void mi_collect(bool force)`. It takes no pointers, and any thread
// may call it at any time.
unsafe extern "C" {
    safe fn mi_collect(force: bool);
}

/// Returns memory to the system that this thread has allocated and others have freed. By itself the
/// allocator does that only while the thread goes on allocating.
pub(crate) fn give_back() {
    mi_collect(true);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Returns the bytes that this process has in RAM, without mapped files.
    fn resident() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    #[test]
    fn memory_freed_by_another_thread_goes_back() {
        const BYTES: usize = 64 << 20;
        let (sender, receiver) = channel();
        let (freed, is_freed) = channel();
        let allocating = std::thread::spawn(move || {
            let pieces: Vec<Vec<u8>> = (0..BYTES / 256).map(|_| vec![1; 256]).collect();
            sender.send(pieces).unwrap();
            is_freed.recv().unwrap();
            give_back();
        });
        let pieces = receiver.recv().unwrap();
        let full = resident();
        drop(pieces);
        freed.send(()).unwrap();
        allocating.join().unwrap();
        let left = resident();
        assert!(left + BYTES as u64 / 2 < full, "{left} of {full}");
    }
}
