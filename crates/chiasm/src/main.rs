//! The `chiasm` command.
#![deny(unsafe_code)]

#[cfg(feature = "mimalloc")]
mod allocator;

use std::process::ExitCode;

#[cfg(feature = "mimalloc")]
use allocator::return_memory;

/// Does nothing: the system's allocator decides by itself when to return memory.
#[cfg(not(feature = "mimalloc"))]
fn return_memory() {}

fn main() -> ExitCode {
    chiasm::main(return_memory)
}
