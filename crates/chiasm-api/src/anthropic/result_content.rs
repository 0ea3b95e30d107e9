//! The content of a result, parsed before the type of its block is known.

use chiasm_request::MediaRef;
use serde::de::Error;

use crate::error::ApiError;
use crate::openai::intake::Intake;

/// The text and the images of a result.
#[derive(Default)]
pub(super) struct ResultContent {
    pub(super) text: String,
    pub(super) images: Vec<MediaRef>,
}

impl ResultContent {
    /// Returns the text.
    ///
    /// # Errors
    /// Fails if there are images.
    pub(super) fn into_text<E: Error>(self, intake: &mut Intake) -> Result<String, E> {
        match self.images.into_iter().next() {
            None => Ok(self.text),
            Some(image) => {
                let message = "documents and search results accept only text, not images";
                Err(intake.refuse(unsupported(image.field, message.to_owned())))
            }
        }
    }
}

/// Creates the error for an unsupported block or source at `field`.
pub(super) fn unsupported(field: String, message: String) -> ApiError {
    ApiError { code: "unsupported_part", ..ApiError::invalid(field, message) }
}
