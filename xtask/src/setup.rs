//! The context of commands that build things in the cache.

use crate::child::{Cancel, Output};
use crate::workspace::Workspace;

/// The context of commands that build things in the cache.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) workspace: Workspace,
    pub(crate) output: Output,
    pub(crate) cancel: Cancel,
}
