//! How many files this process may have open. Each connection is one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// As many as vLLM takes; far beyond this, programs that go through all numbers of files become slow.
const WANTED: u64 = 1 << 16;

/// Takes more if there are fewer than is wanted, as far as the system lets anybody. How many there may be then; `None` for any number.
pub(crate) fn raise() -> Option<u64> {
    let before = getrlimit(Resource::Nofile);
    let after = raised(before);
    match after != before && setrlimit(Resource::Nofile, after).is_ok() {
        true => after.current,
        false => before.current,
    }
}

/// The same, with a warning where there may be fewer than connections are to be taken.
pub(crate) fn raise_for(connections: usize) {
    if let Some(limit) = raise().filter(|limit| *limit < connections as u64) {
        tracing::warn!(
            limit,
            "fewer files may be open than --max-connections ({connections}): raise the hard limit (ulimit -Hn)"
        );
    }
}

fn raised(limit: Rlimit) -> Rlimit {
    let most = limit.maximum.map_or(WANTED, |maximum| maximum.min(WANTED));
    Rlimit { current: limit.current.map(|current| current.max(most)), ..limit }
}

#[cfg(test)]
mod tests {
    use super::*;

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
