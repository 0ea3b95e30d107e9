//! What distinguishes a stored block beyond its tokens.

use chiasm_types::MmHash;

use crate::event::ExtraKey;
use crate::identifier::LastItem;

/// Reads the extra keys of one block after the other.
#[derive(Default)]
pub(super) struct Marks {
    /// Media items of the last block read, each with its offset.
    pub(super) media: Vec<(MmHash, i64)>,
    last: LastItem,
}

impl Marks {
    /// Tells the extra keys of one block apart and returns the salt. `None` when there is a mark
    /// that can't be read. The wire doesn't tag them, so their order tells: LoRA name if the event
    /// has one, media, salt in the `first` block of a prompt.
    pub(super) fn read<'a>(
        &mut self,
        extra_keys: &'a [ExtraKey],
        lora: Option<&str>,
        first: bool,
    ) -> Option<Option<&'a str>> {
        let mut rest = match (extra_keys.split_first(), lora) {
            (Some((ExtraKey::Text(first), rest)), Some(lora)) if first == lora => rest,
            _ => extra_keys,
        };
        self.media.clear();
        while let [ExtraKey::Media { identifier, offset }, after @ ..] = rest {
            self.media.push((self.last.identity(identifier), *offset));
            rest = after;
        }
        let mut salt = None;
        if let ([ExtraKey::Text(text), after @ ..], true) = (rest, first) {
            salt = Some(text.as_str());
            rest = after;
        }
        rest.is_empty().then_some(salt)
    }
}
