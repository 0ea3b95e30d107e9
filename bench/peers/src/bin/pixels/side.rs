//! What all that is measured has in common.

use std::error::Error;

use crate::times::Times;

/// One of those that run in turns, set up for one case.
pub(crate) trait Side {
    /// Its name and version in the results.
    fn name(&self) -> String;

    /// Goes the whole way once, and through those stages that it can do by themselves.
    fn round(&mut self) -> Result<Times, Box<dyn Error>>;

    /// The bytes of the tensor that the last round made; `None` for a side that makes none.
    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>>;
}
