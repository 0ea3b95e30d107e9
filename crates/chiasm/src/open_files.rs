//! The limit of open files of this process. Each connection uses one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit that [`raise_limit`] aims for; vLLM uses the same. Programs that iterate over all
/// possible descriptors become slow far beyond this.
const TARGET_FILES: u64 = 1 << 16;

/// The descriptors for everything but clients' connections: engines' sockets, arenas, downloads,
/// the log.
pub(crate) const RESERVED_FILES: u64 = 128;

/// Raises the soft limit to [`TARGET_FILES`], or to the hard limit if that is lower. Returns the
/// limit in force; `None` means unlimited.
pub(crate) fn raise_limit() -> Option<u64> {
    let before = getrlimit(Resource::Nofile);
    let after = raised(before);
    if after != before && setrlimit(Resource::Nofile, after).is_ok() {
        after.current
    } else {
        before.current
    }
}

/// Raises the limit and returns the number of connections that fit into it, at most `wanted`. Logs
/// a warning if that is less.
///
/// Without a reserve, clients could take all descriptors, and other parts would fail, for example
/// when they connect an engine.
pub(crate) fn raise_limit_for(wanted: usize) -> usize {
    let limit = raise_limit();
    let connections = fitting(limit, wanted);
    if connections < wanted {
        tracing::warn!(
            limit,
            connections,
            max_connections = wanted,
            "fewer connections are accepted than --max-connections: \
             raise the hard limit of open files (ulimit -Hn)"
        );
    }
    connections
}

/// Returns the number of connections that fit into a limit of open files, at most `wanted`. The
/// reserve is [`RESERVED_FILES`], but at most half of the limit.
fn fitting(limit: Option<u64>, wanted: usize) -> usize {
    let room = limit.map(|limit| limit.saturating_sub(RESERVED_FILES).max(limit / 2).max(1));
    room.map_or(wanted, |room| wanted.min(usize::try_from(room).unwrap_or(usize::MAX)))
}

fn raised(limit: Rlimit) -> Rlimit {
    let target = limit.maximum.map_or(TARGET_FILES, |maximum| maximum.min(TARGET_FILES));
    Rlimit { current: limit.current.map(|current| current.max(target)), ..limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_reserved_files() {
        assert_eq!(fitting(None, 8192), 8192);
        assert_eq!(fitting(Some(65_536), 8192), 8192);
        assert_eq!(fitting(Some(4096), 8192), 3968);
        assert_eq!(fitting(Some(256), 8192), 128);
        assert_eq!(fitting(Some(100), 8192), 50);
        assert_eq!(fitting(Some(1), 8192), 1);
        assert_eq!(fitting(Some(1 << 20), usize::MAX), (1 << 20) - 128);
    }

    #[test]
    fn limit_is_raised_to_maximum_but_never_lowered() {
        let raised = |current, maximum| raised(Rlimit { current, maximum }).current;
        assert_eq!(raised(Some(1024), Some(4096)), Some(4096));
        assert_eq!(raised(Some(1024), Some(1 << 30)), Some(TARGET_FILES));
        assert_eq!(raised(Some(1024), None), Some(TARGET_FILES));
        assert_eq!(raised(Some(1 << 20), Some(1 << 20)), Some(1 << 20));
        assert_eq!(raised(None, None), None);
    }
}
