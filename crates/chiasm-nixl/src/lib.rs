//! Reads of another machine's memory by NIXL.
//!
//! A [`Lender`] copies tensors into memory that is registered with NIXL, and lends them. A
//! [`Reader`] on another machine reads them over the transport that NIXL finds between the two:
//! RDMA, TCP or, on one machine, the memory itself. NIXL's library is opened at run time and is not
//! needed to build this crate.
//!
//! NIXL has no deadlines and does not always report the end of a read. If the owner of the memory
//! is stopped, a read over TCP neither ends nor fails. A read can't be cancelled. A read of memory
//! that was unmapped ends the owner's process. Therefore
//!
//! - registered memory stays mapped until the process ends, in pools of a fixed size;
//! - reads have their own deadlines. The target memory of a read that timed out is never used
//!   again. After [`MAX_ABANDONED_READS`] of them, nothing is read any more;
//! - bytes are only accepted if their loan had not ended. When a loan ends without a report of its
//!   reader, its number is invalidated at once for later reads. Its memory is not reused until
//!   earlier reads have timed out.
//!
//! NIXL has neither authentication nor encryption. UCX moves the bytes: a peer that reaches its
//! port can read and write the memory of this process over TCP. [`Settings::devices`] restricts the
//! networks on which it listens.
//!
//! | module | contents |
//! |---|---|
//! | `library` | the functions of NIXL's C interface and their objects: all unsafe code |
//! | `pool` | a pool of registered memory |
//! | `lender` | the side whose memory is read |
//! | `reader` | the side that reads; `read_thread` is its thread, `read_error` its errors |
#![deny(unsafe_code)]

mod lender;
#[allow(unsafe_code, reason = "it calls C")]
mod library;
mod pool;
mod read_error;
mod read_thread;
mod reader;

use std::ffi::c_int;
use std::path::PathBuf;
use std::time::Duration;

pub use lender::{Lender, Loan};
pub use read_error::ReadError;
pub use reader::{Reader, RemoteLoan};

/// The number of abandoned reads after which nothing is read any more. A read is abandoned when it
/// times out, or when the library keeps its memory. Each costs its piece of the pool until the
/// process ends.
pub const MAX_ABANDONED_READS: usize = 64;

/// The settings of a lender or a reader.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The path of NIXL's C library, `libnixl_capi.so`.
    pub library: PathBuf,
    /// The size of the registered memory, in bytes.
    pub pool_bytes: usize,
    /// The maximum duration of a read.
    pub read_timeout: Duration,
    /// The network devices that UCX may use, as in its variable `UCX_NET_DEVICES`. `None` leaves
    /// that variable in effect.
    pub devices: Option<String>,
}

/// The reason why NIXL can't be used.
#[derive(Debug, thiserror::Error)]
pub enum NixlError {
    /// The library is missing, or lacks a function.
    #[error(
        "{path} is not NIXL's C library, or not of a version near 1.5: {reason}",
        path = path.display()
    )]
    Library {
        /// The path of the library.
        path: PathBuf,
        /// The loader's error.
        reason: String,
    },
    /// The library is a stub for linking, which does nothing.
    #[error(
        "{path} is a stub of NIXL's library; give the library of NIXL's wheel",
        path = path.display()
    )]
    Stub {
        /// The path of the library.
        path: PathBuf,
    },
    /// A string for the library contains a zero byte.
    #[error("'{0}' must not contain a zero byte")]
    ZeroByte(String),
    /// A function of the library failed. The library prints its own message on standard error.
    #[error("nixl_capi_{call} failed with status {code}")]
    Failed {
        /// The name of the function.
        call: &'static str,
        /// The status that it returned.
        code: c_int,
    },
    /// A lender sent an address that does not fit into a pointer.
    #[error("the address {0:#x} does not fit into a pointer")]
    InvalidAddress(u64),
    /// A read failed, and the library does not release its memory.
    #[error("a read failed, and NIXL does not release its memory")]
    MemoryNotReleased,
    /// There is not enough memory for the pool.
    #[error("there is not enough memory for the pool: {0}")]
    Pool(std::io::Error),
    /// The read thread can't be started.
    #[error("the read thread can't be started: {0}")]
    Thread(std::io::Error),
}

/// The length of the header before a loan's bytes, which starts with the loan's number and keeps
/// the bytes aligned.
const HEADER_BYTES: usize = 64;
/// The length of the trailer after a loan's bytes, which is the loan's number once more.
const TRAILER_BYTES: usize = 8;
