//! The allocator of this process, and the return of free memory to the system.

/// Requests allocate and free bodies, images and many small objects on different threads. glibc's
/// allocator uses up to eight pools per core for that and rarely returns their memory. mimalloc is
/// as fast and returns free memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[allow(unsafe_code)]
// SAFETY: `mimalloc.h` declares `void mi_collect(bool force)`. It takes no pointers, and any thread
// may call it at any time.
unsafe extern "C" {
    safe fn mi_collect(force: bool);
}

/// Returns memory to the system that this thread has allocated and other threads have freed. By
/// itself the allocator does that only while the thread goes on allocating.
pub(crate) fn return_memory() {
    mi_collect(true);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Returns this process's resident memory in bytes, without mapped files.
    fn resident() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    #[test]
    fn memory_freed_by_other_thread_is_returned() {
        const BYTES: usize = 64 << 20;
        let (sender, receiver) = channel();
        let (signal_freed, freed) = channel();
        let allocating = std::thread::spawn(move || {
            let pieces: Vec<Vec<u8>> = (0..BYTES / 256).map(|_| vec![1; 256]).collect();
            sender.send(pieces).unwrap();
            freed.recv().unwrap();
            return_memory();
        });
        let pieces = receiver.recv().unwrap();
        let full = resident();
        drop(pieces);
        signal_freed.send(()).unwrap();
        allocating.join().unwrap();
        let left = resident();
        assert!(left + BYTES as u64 / 2 < full, "{left} of {full}");
    }
}
