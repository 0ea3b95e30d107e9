//! How many files this process may have open. Each connection is one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// As many as vLLM takes; far beyond this, programs that go through all numbers of files become
/// slow.
const WANTED: u64 = 1 << 16;

/// Takes more if there are fewer than is wanted, as far as the system lets anybody. How many there
/// may be then; `None` for any number.
pub(crate) fn raise() -> Option<u64> {
    let before = getrlimit(Resource::Nofile);
    let after = raised(before);
    match after != before && setrlimit(Resource::Nofile, after).is_ok() {
        true => after.current,
        false => before.current,
    }
}

/// Descriptors for everything but clients' connections: engines' sockets, arenas, downloads, the
/// log.
const RESERVED: u64 = 128;

/// Raises the limit and returns the number of connections that fit into it, at most `wanted`. Logs
/// a warning if that is less.
///
/// With all descriptors taken by clients, other parts would fail at any place: while they connect
/// an engine, say.
pub(crate) fn raise_for(wanted: usize) -> usize {
    let limit = raise();
    let connections = fitting(limit, wanted);
    if connections < wanted {
        tracing::warn!(
            limit,
            connections,
            "fewer connections are taken than --max-connections ({wanted}): raise the hard limit of open files (ulimit -Hn)"
        );
    }
    connections
}

/// Returns the number of connections that fit into a limit of open files: all but [`RESERVED`], but
/// at least half.
fn fitting(limit: Option<u64>, wanted: usize) -> usize {
    let room = limit.map(|limit| limit.saturating_sub(RESERVED).max(limit / 2).max(1));
    room.map_or(wanted, |room| wanted.min(usize::try_from(room).unwrap_or(usize::MAX)))
}

fn raised(limit: Rlimit) -> Rlimit {
    let most = limit.maximum.map_or(WANTED, |maximum| maximum.min(WANTED));
    Rlimit { current: limit.current.map(|current| current.max(most)), ..limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_others() {
        assert_eq!(fitting(None, 8192), 8192);
        assert_eq!(fitting(Some(65_536), 8192), 8192);
        assert_eq!(fitting(Some(4096), 8192), 3968);
        assert_eq!(fitting(Some(256), 8192), 128);
        assert_eq!(fitting(Some(100), 8192), 50);
        assert_eq!(fitting(Some(1), 8192), 1);
        assert_eq!(fitting(Some(1 << 20), usize::MAX), (1 << 20) - 128);
    }

    #[test]
    fn a_limit_is_raised_as_far_as_it_may_be_and_never_lowered() {
        let raised = |current, maximum| raised(Rlimit { current, maximum }).current;
        assert_eq!(raised(Some(1024), Some(4096)), Some(4096));
        assert_eq!(raised(Some(1024), Some(1 << 30)), Some(WANTED));
        assert_eq!(raised(Some(1024), None), Some(WANTED));
        assert_eq!(raised(Some(1 << 20), Some(1 << 20)), Some(1 << 20));
        assert_eq!(raised(None, None), None);
    }
}
