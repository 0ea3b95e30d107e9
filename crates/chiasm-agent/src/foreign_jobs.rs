//! Conversion of other frontends' jobs to and from messages.

use bytes::{Bytes, BytesMut};
use chiasm_backend::{ForeignJob, ForeignJobEvent, ForeignMediaItem};
use chiasm_types::MmHash;

use crate::proto;
use crate::proto::watch_event::Event;

/// The size of a block key in bytes.
const KEY_BYTES: usize = 16;

pub(crate) fn to_message(number: u64, job: &ForeignJob) -> proto::OthersJob {
    let ForeignJob { keys, prompt_tokens, media } = job;
    let mut block_keys = BytesMut::with_capacity(KEY_BYTES * keys.len());
    keys.iter().for_each(|key| block_keys.extend_from_slice(&key.to_le_bytes()));
    proto::OthersJob {
        job: number,
        block_keys: block_keys.freeze(),
        prompt_tokens: *prompt_tokens as u32,
        media: media.iter().map(item_to_message).collect(),
    }
}

fn item_to_message(item: &ForeignMediaItem) -> proto::OthersItem {
    let ForeignMediaItem { hash, end, embeds, elements } = item;
    let mm_hash = Bytes::copy_from_slice(hash.as_bytes());
    proto::OthersItem { mm_hash, end: *end as u32, embeds: *embeds as u32, elements: *elements }
}

/// Parses an event about other frontends' jobs; `None` if it is malformed or about something else.
pub(crate) fn from_message(event: Event) -> Option<ForeignJobEvent> {
    Some(match event {
        Event::OthersJob(job) => ForeignJobEvent::Started(job.job, job_from_message(job)?),
        Event::OthersJobComputed(job) => ForeignJobEvent::PromptComputed(job),
        Event::OthersJobEnded(job) => ForeignJobEvent::Ended(job),
        Event::OthersJobsVoid(_) => ForeignJobEvent::Reset,
        _ => return None,
    })
}

fn job_from_message(message: proto::OthersJob) -> Option<ForeignJob> {
    let proto::OthersJob { job: _, block_keys, prompt_tokens, media } = message;
    let (keys, rest) = block_keys.as_chunks::<KEY_BYTES>();
    if !rest.is_empty() {
        return None;
    }
    Some(ForeignJob {
        keys: keys.iter().map(|key| u128::from_le_bytes(*key)).collect(),
        prompt_tokens: prompt_tokens as usize,
        media: media.into_iter().map(item_from_message).collect::<Option<_>>()?,
    })
}

fn item_from_message(message: proto::OthersItem) -> Option<ForeignMediaItem> {
    let proto::OthersItem { mm_hash, end, embeds, elements } = message;
    let hash = MmHash::new(mm_hash.as_ref().try_into().ok()?);
    Some(ForeignMediaItem { hash, end: end as usize, embeds: embeds as usize, elements })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_job_survives_the_wire_or_is_refused() {
        let item =
            ForeignMediaItem { hash: MmHash::new([3; 32]), end: 9, embeds: 4, elements: 1 << 40 };
        let job = ForeignJob { keys: vec![1 << 126, 5], prompt_tokens: 40, media: vec![item] };
        let message = to_message(7, &job);
        assert_eq!(
            from_message(Event::OthersJob(message.clone())),
            Some(ForeignJobEvent::Started(7, job))
        );
        let cut = proto::OthersJob { block_keys: message.block_keys.slice(1..), ..message.clone() };
        assert_eq!(from_message(Event::OthersJob(cut)), None);
        let short = proto::OthersItem { mm_hash: Bytes::new(), ..message.media[0].clone() };
        assert_eq!(
            from_message(Event::OthersJob(proto::OthersJob { media: vec![short], ..message })),
            None
        );
        assert_eq!(from_message(Event::CaughtUp(true)), None);
    }
}
