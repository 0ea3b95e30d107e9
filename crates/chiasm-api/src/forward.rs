//! Requests and answers that are forwarded unchanged, to and from servers that speak these
//! protocols themselves.
//!
//! | module | is |
//! |---|---|
//! | `body` | the body of a forwarded request |
//! | `named` | bodies with inline images, each named by its identity |
//! | `pieces` | an approximation of the prompt, for servers that don't report their cache contents |
//! | `relay` | the whole events of a streamed answer |

mod body;
mod named;
mod pieces;
mod relay;

pub use body::{ForwardBody, model_name_range};
pub use named::body_with_named_images;
pub use pieces::prompt_pieces;
pub use relay::{Ending, EventRelay};
