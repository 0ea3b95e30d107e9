//! The `chiasm` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Requests allocate and free bodies, images and many small things on different threads. glibc's allocator has up to eight pools per
/// core for that, from which memory rarely returns; this one takes as little time, and gives back what is free.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    chiasm::main()
}
