//! Requests and answers that are passed on as they came, to and from servers that speak these
//! protocols themselves.
//!
//! | module | is |
//! |---|---|
//! | `body` | the body of such a request |
//! | `named` | bodies whose images have names of ours |
//! | `pieces` | an approximation of the prompt, for servers that don't say what they hold |
//! | `relay` | the events of a streamed answer, whole ones only |

mod body;
mod named;
mod pieces;
mod relay;

pub use body::{ForwardBody, place_of_model};
pub use named::with_names;
pub use pieces::pieces;
pub use relay::{Ending, EventRelay};
