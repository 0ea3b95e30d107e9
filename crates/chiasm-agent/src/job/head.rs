//! The cost of a job, known before its message is decoded.

use chiasm_backend::JobError;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::TOKEN_BYTES;
use crate::proto;

// The number of a field of a request in `agent.proto`, and of fields of a job's message.
const BEGIN: u32 = 2;
const NUMBER: u32 = 1;
const SAMPLING: u32 = 6;
const REPEATS: u32 = 14;
const LEFT: u32 = 16;
const TOKENS: u32 = 20;

/// The facts about a job that are known before its message is decoded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct JobHead {
    /// The job's number.
    pub(crate) number: u64,
    /// An upper bound on the memory of the decoded message, in bytes: fields that are empty on the
    /// wire still take memory.
    pub(crate) bytes: u64,
    /// The number of the message's fields, with each element of a list counted.
    pub(crate) entries: usize,
}

/// The maximum memory in bytes that a byte of a list of lists, or of JSON, takes when decoded.
const MEMORY_PER_LIST_BYTE: u64 = 16;

/// The maximum number of media items and similar entries of a job, which are small on the wire and
/// large in memory. It is more than a prompt has, unless the frontend's flags allow more.
pub(crate) const MAX_ENTRIES: usize = 1 << 16;

impl JobHead {
    /// Checks that an agent would decode the rest.
    ///
    /// # Errors
    /// [`JobError::Refused`] if there are too many entries.
    pub(crate) fn check(&self) -> Result<(), JobError> {
        if self.entries <= MAX_ENTRIES {
            return Ok(());
        }
        let message = format!(
            "has too many media items: an agent accepts {MAX_ENTRIES} fields in one request"
        );
        Err(JobError::Refused { field: "messages".to_owned(), message })
    }
}

/// Reads the head of a job's message; `None` if it is malformed.
pub(crate) fn parse_head(message: &[u8]) -> Option<JobHead> {
    let mut rest = message;
    let mut head = JobHead { number: 0, bytes: message.len() as u64, entries: 0 };
    while !rest.is_empty() {
        let (field, kind) = decode_key(&mut rest).ok()?;
        let before = rest.len();
        match (field, kind) {
            (NUMBER, WireType::Varint) => head.number = decode_varint(&mut rest).ok()?,
            _ => skip_field(kind, field, &mut rest, DecodeContext::default()).ok()?,
        }
        let length = (before - rest.len()) as u64;
        head.bytes += match field {
            TOKENS | LEFT => 0,
            SAMPLING | REPEATS => MEMORY_PER_LIST_BYTE * length,
            // Each of these fields may be an element of a list.
            _ => {
                head.entries += 1;
                MEMORY_PER_LIST_BYTE * length + size_of::<proto::MediaItem>() as u64
            }
        };
    }
    Some(head)
}

/// Returns a job's number from the first bytes of its request; `None` if the number is not the
/// first field.
pub(crate) fn peek_number(mut request: &[u8]) -> Option<u64> {
    (decode_key(&mut request).ok()? == (BEGIN, WireType::LengthDelimited)).then_some(())?;
    decode_varint(&mut request).ok()?;
    (decode_key(&mut request).ok()? == (NUMBER, WireType::Varint)).then_some(())?;
    decode_varint(&mut request).ok()
}

/// Returns the bytes that a message expands to beside its own: repeated tokens, and masks of media
/// items, by their claimed lengths.
pub(crate) fn claimed_bytes(message: &proto::Job) -> u64 {
    let repeated = message.repeats.iter().map(|repeats| u64::from(repeats.more)).sum::<u64>();
    let masks = message
        .media
        .iter()
        .filter(|item| !item.embeds.is_empty())
        .map(|item| u64::from(item.length));
    repeated * TOKEN_BYTES as u64 + masks.sum::<u64>()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message;

    use super::*;

    #[test]
    fn memory_of_a_job_is_known_before_decoding() {
        let head_of = |message: &proto::Job| parse_head(&message.encode_to_vec()).unwrap();
        let plain = proto::Job {
            number: 7,
            tokens: Bytes::from_static(&[5; 4000]),
            ..proto::Job::default()
        };
        let JobHead { number, bytes, .. } = head_of(&plain);
        assert!(number == 7 && (4000..5000).contains(&bytes), "{bytes}");
        let empty_items = vec![proto::MediaItem::default(); 1000];
        let items = proto::Job { media: empty_items, ..plain.clone() };
        assert!(head_of(&items).bytes > size_of_val(&items.media[..]) as u64);
        let bad_words = vec![proto::TokenList::default(); 1000];
        let in_memory = size_of_val(&bad_words[..]) as u64;
        let sampling = Some(proto::Sampling { bad_words, ..proto::Sampling::default() });
        assert!(head_of(&proto::Job { sampling, ..plain.clone() }).bytes > in_memory);
        let with_items = |count| {
            head_of(&proto::Job {
                media: vec![proto::MediaItem::default(); count],
                ..plain.clone()
            })
        };
        // One entry is the number.
        assert!(
            with_items(MAX_ENTRIES - 1).check().is_ok() && with_items(MAX_ENTRIES).check().is_err()
        );
        let cut = plain.encode_to_vec();
        assert_eq!(parse_head(&cut[..cut.len() - 1]), None);
        let claimed = u64::from(u32::MAX);
        let repeats = vec![proto::Repeats { at: 0, more: u32::MAX }; 2];
        assert_eq!(
            claimed_bytes(&proto::Job { repeats, ..plain.clone() }),
            2 * claimed * TOKEN_BYTES as u64
        );
        let item =
            proto::MediaItem { length: u32::MAX, embeds: vec![1], ..proto::MediaItem::default() };
        assert_eq!(claimed_bytes(&proto::Job { media: vec![item; 3], ..plain }), 3 * claimed);
    }
}
