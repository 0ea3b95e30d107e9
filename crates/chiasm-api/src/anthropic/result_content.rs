//! The content of a result, before it is known which block it belongs to.

use chiasm_request::MediaRef;
use serde::de::Error;

use crate::error::ApiError;
use crate::openai::intake::Intake;

/// What a function gave back.
#[derive(Default)]
pub(super) struct ResultContent {
    pub(super) text: String,
    pub(super) images: Vec<MediaRef>,
}

impl ResultContent {
    /// Its text, where there may be no images.
    pub(super) fn text_alone<E: Error>(self, intake: &mut Intake) -> Result<String, E> {
        match self.images.into_iter().next() {
            None => Ok(self.text),
            Some(image) => {
                let message = "documents and search results are read as text alone, without images";
                Err(intake.refuse(unsupported(image.field, message.to_owned())))
            }
        }
    }
}

pub(super) fn unsupported(field: String, message: String) -> ApiError {
    ApiError { code: "unsupported_part", ..ApiError::invalid(field, message) }
}
