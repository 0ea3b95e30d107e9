//! Lines on standard output, for commands whose reader may go away, as in `chiasm demo | head`.

/// Like `println!`, but a reader that has gone is no reason to panic.
macro_rules! line {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

pub(crate) use line;
