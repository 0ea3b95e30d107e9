//! What the steps that make things in the cache are given.

use crate::child::{Cancel, Output};
use crate::workspace::Workspace;

/// What making things in the cache needs to know.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) workspace: Workspace,
    pub(crate) output: Output,
    pub(crate) cancel: Cancel,
}
