//! Opening of a request's media items, and the limits on their number.

use std::collections::BTreeMap;

use chiasm_media::{EncodedMedia, MediaName, MediaPart};
use chiasm_request::MediaRef;
use chiasm_types::Modality;
use futures_util::future::try_join_all;

use super::error::{Cause, RequestError};
use crate::Pipeline;

/// Opens every media item. Takes the items' sources, because they may be large.
pub(super) async fn open_all(
    pipeline: &Pipeline,
    media: &mut [MediaRef],
    owner: [Option<&[u8]>; 2],
) -> Result<Vec<EncodedMedia>, RequestError> {
    for item in &*media {
        if !pipeline.accepts(&item.modality) {
            let message =
                format!("the model '{}' does not support {}", pipeline.model.name, item.modality);
            return Err(RequestError::invalid(&item.field, message));
        }
    }
    check_counts(media, |modality| pipeline.limits.items_per_prompt.get(modality))?;
    let open = async |item: &mut MediaRef| {
        let at_field = |error| RequestError::from(error).at(&item.field);
        let name = item
            .uuid
            .as_deref()
            .map(|uuid| MediaName::new(owner, uuid))
            .transpose()
            .map_err(at_field)?;
        let modality = item.modality.clone();
        pipeline
            .media
            .open(MediaPart { source: item.source.take(), name, modality })
            .await
            .map_err(at_field)
    };
    try_join_all(media.iter_mut().map(open)).await
}

/// Checks the number of items of each modality against `limit`.
///
/// # Errors
/// Returns [`Cause::TooManyItems`] at the field of the first item over its limit.
pub fn check_counts(
    media: &[MediaRef],
    limit: impl Fn(&Modality) -> usize,
) -> Result<(), RequestError> {
    for (modality, count) in count_by_modality(media) {
        let limit = limit(modality);
        if count > limit {
            let message = format!(
                "the prompt has {count} {modality} items, \
                 at most {limit} are allowed (--limit-mm-per-prompt)"
            );
            let field = media
                .iter()
                .filter(|item| item.modality == *modality)
                .nth(limit)
                .map(|item| item.field.clone());
            return Err(RequestError { cause: Cause::TooManyItems(message), field });
        }
    }
    Ok(())
}

/// Counts the items of each modality.
fn count_by_modality(media: &[MediaRef]) -> BTreeMap<&Modality, usize> {
    let mut counts = BTreeMap::new();
    media.iter().for_each(|item| *counts.entry(&item.modality).or_default() += 1);
    counts
}
