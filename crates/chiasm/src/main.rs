//! The `chiasm` command.
#![deny(unsafe_code)]

#[cfg(feature = "mimalloc")]
mod allocator;

use std::process::ExitCode;

#[cfg(feature = "mimalloc")]
use allocator::give_back;

/// Gives back no memory: the system's allocator decides alone.
#[cfg(not(feature = "mimalloc"))]
fn give_back() {}

fn main() -> ExitCode {
    chiasm::main(give_back)
}
