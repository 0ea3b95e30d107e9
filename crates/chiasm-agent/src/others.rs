//! Jobs of other frontends as messages, and back.

use bytes::{Bytes, BytesMut};
use chiasm_backend::{OthersEvent, OthersItem, OthersJob};
use chiasm_types::MmHash;

use crate::proto;
use crate::proto::watch_event::Event;

/// Bytes of a block's key.
const KEY: usize = 16;

pub(crate) fn to_message(job: u64, told: &OthersJob) -> proto::OthersJob {
    let OthersJob { keys, prompt_tokens, media } = told;
    let mut block_keys = BytesMut::with_capacity(KEY * keys.len());
    keys.iter().for_each(|key| block_keys.extend_from_slice(&key.to_le_bytes()));
    proto::OthersJob {
        job,
        block_keys: block_keys.freeze(),
        prompt_tokens: *prompt_tokens as u32,
        media: media.iter().map(item_to_message).collect(),
    }
}

fn item_to_message(item: &OthersItem) -> proto::OthersItem {
    let OthersItem { hash, end, embeds, elements } = item;
    let mm_hash = Bytes::copy_from_slice(hash.as_bytes());
    proto::OthersItem { mm_hash, end: *end as u32, embeds: *embeds as u32, elements: *elements }
}

/// What an event says of jobs of others; `None` if it says something else, or what it must not.
pub(crate) fn from_message(event: Event) -> Option<OthersEvent> {
    Some(match event {
        Event::OthersJob(job) => OthersEvent::Begun(job.job, job_from_message(job)?),
        Event::OthersJobComputed(job) => OthersEvent::Computed(job),
        Event::OthersJobEnded(job) => OthersEvent::Ended(job),
        Event::OthersJobsVoid(_) => OthersEvent::Forget,
        _ => return None,
    })
}

fn job_from_message(message: proto::OthersJob) -> Option<OthersJob> {
    let proto::OthersJob { job: _, block_keys, prompt_tokens, media } = message;
    let (keys, rest) = block_keys.as_chunks::<KEY>();
    if !rest.is_empty() {
        return None;
    }
    Some(OthersJob {
        keys: keys.iter().map(|key| u128::from_le_bytes(*key)).collect(),
        prompt_tokens: prompt_tokens as usize,
        media: media.into_iter().map(item_from_message).collect::<Option<_>>()?,
    })
}

fn item_from_message(message: proto::OthersItem) -> Option<OthersItem> {
    let proto::OthersItem { mm_hash, end, embeds, elements } = message;
    let hash = MmHash::new(mm_hash.as_ref().try_into().ok()?);
    Some(OthersItem { hash, end: end as usize, embeds: embeds as usize, elements })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_others_is_the_same_at_the_other_end_or_refused() {
        let item = OthersItem { hash: MmHash::new([3; 32]), end: 9, embeds: 4, elements: 1 << 40 };
        let told = OthersJob { keys: vec![1 << 126, 5], prompt_tokens: 40, media: vec![item] };
        let message = to_message(7, &told);
        assert_eq!(
            from_message(Event::OthersJob(message.clone())),
            Some(OthersEvent::Begun(7, told))
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
