//! The memory that this process may use.

use std::path::{Path, PathBuf};

/// Returns the free bytes of this machine, capped by the limits of the process's control group
/// (version 2) and its ancestors. Returns `None` if `/proc/meminfo` can't be read.
pub(crate) fn free_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(available(&meminfo)?.min(group_limit(&groups, Path::new("/sys/fs/cgroup"))))
}

/// Parses the line `MemAvailable:   23456 kB` of `/proc/meminfo`; returns bytes.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Returns the smallest `memory.max` from the group of the line `0::/a/b` up to the root.
fn group_limit(groups: &str, root: &Path) -> u64 {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let folders = Path::new(group).ancestors().map(|group| root.join(group));
    // `memory.max` of a group without a limit has the word `max`.
    let limit = |folder: PathBuf| {
        std::fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse().ok()
    };
    folders.filter_map(limit).min().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mem_available_is_parsed() {
        assert_eq!(
            available("MemTotal:  9 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(available("MemTotal:  9 kB\n"), None);
    }

    #[test]
    fn smallest_cgroup_limit_applies() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("pods/one");
        std::fs::create_dir_all(&inner).unwrap();
        assert_eq!(group_limit("0::/pods/one\n", root.path()), u64::MAX);
        std::fs::write(inner.join("memory.max"), "max\n").unwrap();
        std::fs::write(root.path().join("pods/memory.max"), "1000\n").unwrap();
        assert_eq!(group_limit("0::/pods/one\n", root.path()), 1000);
        std::fs::write(inner.join("memory.max"), "900\n").unwrap();
        assert_eq!(group_limit("4:memory:/x\n0::/pods/one\n", root.path()), 900);
        assert_eq!(group_limit("0::/pods\n", root.path()), 1000);
        // A process in a control group namespace of its own sees `/`.
        std::fs::write(root.path().join("memory.max"), "800\n").unwrap();
        assert_eq!(group_limit("0::/\n", root.path()), 800);
    }
}
