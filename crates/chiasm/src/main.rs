//! The `chiasm` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Gives freed memory back to the system a second later, while others are served. glibc's keeps it in up to eight pools per core.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    chiasm::main()
}
