//! The parts that the measuring programs share.

#![forbid(unsafe_code)]

pub mod clock;
pub mod flags;
pub mod numbers;
pub mod row;

use std::error::Error;
use std::process::ExitCode;

/// The error of a wrong command line.
pub const USAGE: &str = "usage: see bench/peers/README.md";

/// Prints the error of a program, if there is one.
pub fn exit_code(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
