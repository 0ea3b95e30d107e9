//! The `chiasm` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Requests allocate and free bodies, images and many small things on different threads. glibc's allocator gives each thread memory
/// of its own, which it rarely returns; this one takes less time and less memory.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    chiasm::main()
}
