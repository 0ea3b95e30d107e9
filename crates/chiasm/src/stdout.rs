//! Lines on standard output, for commands whose reader may go away, as in `chiasm demo | head`.

/// Prints a line like `println!`, but ignores a closed standard output instead of panicking.
macro_rules! line {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

pub(crate) use line;
