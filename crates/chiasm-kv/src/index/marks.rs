//! What distinguishes a stored block beyond its tokens.

use chiasm_types::MmHash;

use crate::event::ExtraKey;
use crate::identifier::media_identity;

/// The extra keys of one block, told apart.
pub(super) struct Marks<'a> {
    pub(super) media: Vec<(MmHash, i64)>,
    pub(super) salt: Option<&'a str>,
}

impl<'a> Marks<'a> {
    /// `None` when there is a mark that can't be read. The wire doesn't tag them, so their order tells: LoRA name if the
    /// event has one, media, salt in the `first` block of a
    /// prompt.
    pub(super) fn read(extra_keys: &'a [ExtraKey], lora: Option<&str>, first: bool) -> Option<Self> {
        let mut rest = match (extra_keys.split_first(), lora) {
            (Some((ExtraKey::Text(first), rest)), Some(lora)) if first == lora => rest,
            _ => extra_keys,
        };
        let mut marks = Self { media: Vec::new(), salt: None };
        while let [ExtraKey::Media { identifier, offset }, after @ ..] = rest {
            marks.media.push((media_identity(identifier), *offset));
            rest = after;
        }
        if let ([ExtraKey::Text(salt), after @ ..], true) = (rest, first) {
            marks.salt = Some(salt);
            rest = after;
        }
        rest.is_empty().then_some(marks)
    }
}
