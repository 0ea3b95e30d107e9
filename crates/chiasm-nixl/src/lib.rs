//! Reads of another machine's memory by NIXL.
//!
//! A [`Lender`] copies tensors into memory that NIXL knows and lends them; a [`Reader`] on another
//! machine reads them from there, with whatever NIXL finds between the two: RDMA, TCP, or on one
//! machine the memory itself. NIXL's library is opened at run time, and nothing of it is needed to
//! build this.
//!
//! NIXL knows neither deadlines nor ends that can be relied on: an owner of memory that is stopped
//! gives a reading over TCP no end and no error, a reading can't be taken back, and one that comes
//! after memory was unmapped ends its owner. So
//!
//! - memory that NIXL knows stays mapped for as long as the process: pools of a fixed size;
//! - readings have deadlines of their own. What one that has missed its deadline was to read into
//!   is never used again; there may be [`MOST_ABANDONED`] of them, then nothing is read any more;
//! - what was read is only taken if its loan was not over. A loan that nobody says the end of is
//!   over at once for readings that begin later, by its number, and its memory rests until those
//!   that began before have missed their deadline.
//!
//! NIXL has neither authentication nor encryption. Who reaches the port of UCX, which moves the
//! bytes, can read and write the memory of this process over TCP: [`Settings::devices`] says where
//! it is reached.
//!
//! | module | is |
//! |---|---|
//! | `library` | the functions of NIXL's C interface and what they own: all unsafe code |
//! | `pool` | memory that NIXL knows, in pieces |
//! | `lender` | the side whose memory is read |
//! | `reader` | the side that reads; `reading` is its thread, `not_read` its errors |
#![deny(unsafe_code)]

mod lender;
#[allow(unsafe_code, reason = "it calls C")]
mod library;
mod not_read;
mod pool;
mod reader;
mod reading;

use std::ffi::c_int;
use std::path::PathBuf;
use std::time::Duration;

pub use lender::{Lender, Loan};
pub use not_read::NotRead;
pub use reader::{Lent, Reader};

/// How many readings may have missed their deadline, or come to an end after which the library
/// keeps their memory, until nothing is read any more: each costs its piece of the pool for as long
/// as the process.
pub const MOST_ABANDONED: usize = 64;

/// What either side needs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// NIXL's C library, `libnixl_capi.so`.
    pub library: PathBuf,
    /// Bytes of memory that NIXL knows.
    pub pool_bytes: usize,
    /// How long a reading may take.
    pub within: Duration,
    /// The network devices that UCX may use, as in its `UCX_NET_DEVICES`; as that variable says if
    /// none are given.
    pub devices: Option<String>,
}

/// Why NIXL can't be used.
#[derive(Debug, thiserror::Error)]
pub enum NixlError {
    /// There is no library, or one without these functions.
    #[error("{path} is not NIXL's C library of a version near 1.5: {why}", path = path.display())]
    Library {
        /// Where it should be.
        path: PathBuf,
        /// What is wrong with it, in the loader's words.
        why: String,
    },
    /// The library is there to be linked with and does nothing.
    #[error("{path} is a stub of NIXL's library: name the one of its wheel", path = path.display())]
    Stub {
        /// Where it is.
        path: PathBuf,
    },
    /// Text for the library has a zero in it.
    #[error("'{0}' can't have a zero in it")]
    Text(String),
    /// The library refuses; its own words are on standard error.
    #[error("nixl_capi_{call} fails with {code}")]
    Failed {
        /// The function.
        call: &'static str,
        /// Its status.
        code: c_int,
    },
    /// A lender tells an address that there is not.
    #[error("there is no address {0:#x}")]
    Address(u64),
    /// A reading has failed, and the library does not let go of its memory.
    #[error("a reading has failed, and NIXL does not let go of its memory")]
    Kept,
    /// There is no memory for a pool of that size.
    #[error("there is no memory for a pool of that size: {0}")]
    Pool(std::io::Error),
    /// The thread that reads can't be started.
    #[error("the thread that reads can't be started: {0}")]
    Thread(std::io::Error),
}

/// A loan's number stands before its bytes, in as many bytes as keep them aligned, and once more
/// behind them.
const HEAD: usize = 64;
const TAIL: usize = 8;
